"""Owners of parameters: complete, on different hosts, balanced, few moves, and the same for who asks again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.ownership import MemberPlace, Owners, living, owners, senders, shares

LAYERS = [2048, 8] * 12
SIZES = st.lists(st.integers(0, 1000), max_size=30)


def places(*hosts: int) -> list[MemberPlace]:
    """Members of hosts of so many members."""
    names = [host for host, number in enumerate(hosts) for _ in range(number)]
    return [MemberPlace(f"w{rank}", f"host {host}") for rank, host in enumerate(names)]


def moves(before: Owners, after: Owners) -> int:
    return sum(len(set(now) - set(then)) for then, now in zip(before, after, strict=True))


@given(SIZES, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4))
def test_each_parameter_has_its_copies_on_as_many_hosts_as_there_are(
    sizes: list[int], hosts: list[int], copies: int
) -> None:
    members = places(*hosts)
    host_of = {one.worker_id: one.host for one in members}
    for each in owners(sizes, members, copies):
        assert len(each) == len(set(each)) == min(copies, len(members))
        assert len({host_of[one] for one in each}) == min(copies, len(hosts))


@given(SIZES, st.integers(1, 6), st.integers(1, 3))
def test_nobody_owns_more_than_the_mean_and_a_parameter_for_each_copy(sizes: list[int], size: int, copies: int) -> None:
    found = shares(sizes, owners(sizes, places(size), copies))
    mean = sum(sizes) * min(copies, size) / size
    assert max(found.values(), default=0) <= mean + copies * max(sizes, default=0)


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (3, 1), (3, 2), (4, 2), (8, 2)])
def test_layers_of_one_size_are_shared_out_evenly(size: int, copies: int) -> None:
    found = shares(LAYERS, owners(LAYERS, places(size), copies))
    assert max(found.values()) <= 1.15 * sum(LAYERS) * copies / size


@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.data())
def test_what_was_found_is_found_again(sizes: list[int], size: int, copies: int, data: st.DataObject) -> None:
    """Also after a loss and a join: members that ask at different times do the same."""
    members = places(size)
    table = owners(sizes, members, copies)
    assert owners(sizes, members, copies, table) == table
    survivors = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
    now = [*survivors, MemberPlace("w9", "host 0")]
    after = owners(sizes, now, copies, table)
    assert owners(sizes, now, copies, after) == after
    assert all(len(each) == min(copies, len(now)) for each in after)


def test_a_loss_moves_only_what_the_lost_one_has_owned() -> None:
    members = places(4)
    table = owners(LAYERS, members, 2)
    after = owners(LAYERS, members[:-1], 2, table)
    owned = sum("w3" in each for each in table)
    assert moves(table, after) <= 1.3 * owned
    assert max(shares(LAYERS, after).values()) <= 1.2 * sum(LAYERS) * 2 / 3


def test_a_newcomer_gets_its_part_and_the_others_exchange_nothing() -> None:
    members = places(4)
    table = owners(LAYERS, members[:-1], 2)
    after = owners(LAYERS, members, 2, table)
    assert all(set(now) - set(then) <= {"w3"} for then, now in zip(table, after, strict=True))
    assert shares(LAYERS, after)["w3"] >= 0.8 * sum(LAYERS) * 2 / 4


def test_where_all_hold_everything_nothing_moves() -> None:
    """A state that was not shared out yet."""
    members = places(4)
    everyone = tuple(one.worker_id for one in members)
    table = owners(LAYERS, members, 2, (everyone,) * len(LAYERS))
    assert all(len(each) == 2 for each in table)
    assert max(shares(LAYERS, table).values()) <= 1.15 * sum(LAYERS) * 2 / 4


def test_those_that_send_are_balanced() -> None:
    table = owners(LAYERS, places(4), 2)
    sent = shares(LAYERS, tuple(each[:1] for each in table))
    assert max(sent.values()) <= 1.15 * sum(LAYERS) / 4


def test_a_parameter_that_is_larger_than_all_others_has_owners_that_own_nothing_else() -> None:
    """An embedding: the rest goes to the other members."""
    sizes = [1000, *[10] * 30]
    found = shares(sizes, owners(sizes, places(4), 1))
    assert sorted(found.values())[-1] == 1000


def test_a_parameter_is_lost_with_its_last_owner() -> None:
    table = (("w0", "w1"), ("w1", "w2"))
    assert living(table, ["w2", "w0"]) == (("w0",), ("w2",))
    assert living(table, ["w0"]) == (("w0",), ())


def test_parameters_that_come_later_get_owners_and_the_others_keep_theirs() -> None:
    members = places(3)
    table = owners(LAYERS, members, 2)
    after = owners([*LAYERS, 8, 8], members, 2, table)
    assert moves(table, after[: len(LAYERS)]) == 0
    assert all(len(each) == 2 for each in after)


def test_a_parameter_travels_only_to_hosts_on_which_nobody_has_it() -> None:
    """Its owners on several hosts have computed the same value."""
    hosts = ["a", "a", "a", "b", "b", "c", "c"]
    assert senders(1, [False, True, False, False, True, False, False], hosts) == [(1, (0, 2, 5, 6)), (4, (3,))]
    assert senders(2, [False, True, True, False, False, False, False], hosts) == [(2, (0, 3, 4, 5, 6))]
    assert senders(0, [True] * 7, hosts) == []
