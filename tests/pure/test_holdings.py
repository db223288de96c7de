"""Who is to hold the states of replicas, and how units come to members that are to hold them."""

from __future__ import annotations

import itertools

import pytest

from unisono.core.holdings import Move, computed, copied, handed_over, holders_of, moves


def same_size(unit: int) -> int:
    return 1


def test_who_computes_a_replica_gets_its_state_from_the_first_that_has_it() -> None:
    holders = {0: (0, 1), 1: (1,), 2: (2,)}
    for needs, expected in (
        ([(0, 1), (), (2,)], [Move(1, 1, (0,))]),
        ([(), (), (0, 1, 2)], [Move(0, 0, (2,)), Move(1, 1, (2,))]),
        ([(2,), (2,), (2,)], [Move(2, 2, (0, 1))]),  # once, to all who compute it together
    ):
        assert moves(holders, computed(holders, needs), same_size) == expected


def test_those_that_send_are_balanced() -> None:
    holders = {0: (0, 1), 1: (0, 1), 2: (0, 1, 2)}
    everyone = dict.fromkeys(holders, range(4))
    assert [one.source for one in moves(holders, everyone, same_size)] == [0, 1, 2]
    assert [one.source for one in moves(holders, everyone, {0: 5, 1: 2, 2: 1}.__getitem__)] == [0, 1, 2]
    assert [one.source for one in moves(holders, {**everyone, 2: (0, 1, 2)}, {0: 5, 1: 2}.__getitem__)] == [0, 1]


def test_nothing_moves_of_a_unit_that_nobody_holds() -> None:
    assert moves({1: (0,)}, {0: (0, 1), 1: (0, 1)}, same_size) == [Move(1, 0, (1,))]


def test_the_holders_follow_from_what_each_holds() -> None:
    assert holders_of([[2, 0], [], {2}]) == {0: (0,), 2: (0, 2)}


def test_each_state_has_its_copies_and_no_member_many_more_than_the_others() -> None:
    for workers, replicas, num in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 4, 8), (1, 2, 3)):
        holders = {replica: (replica % workers,) for replica in range(replicas)}
        after = copied(holders, [""] * workers, num)
        assert all(len(having) == min(num, workers) for having in after.values())
        loads = [sum(rank in having for having in after.values()) for rank in range(workers)]
        assert max(loads) <= -(-sum(loads) // workers) + 1


def test_copies_are_on_different_hosts_where_there_are_several() -> None:
    hosts = ["a", "a", "b", "b"]
    assert copied({0: (0,), 1: (2,)}, hosts, 2) == {0: (0, 3), 1: (1, 2)}
    # Two copies on one host do not survive that host.
    assert copied({0: (0, 1)}, hosts, 2) == {0: (0, 1, 2)}
    assert copied({0: (0, 1)}, ["a", "a"], 2) == {0: (0, 1)}
    assert copied({0: (0, 2)}, hosts, 2) == {0: (0, 2)}
    assert copied({0: (0,)}, ["a", "b"], 3) == {0: (0, 1)}


def test_one_copy_moves_nothing() -> None:
    assert copied({0: (0,), 1: (1,)}, ["a", "b"], 1) == {0: (0,), 1: (1,)}


@pytest.mark.parametrize(
    ("holders", "staying", "num_copies", "expected"),
    [
        ({0: [0, 1], 1: [1, 2]}, [0], 2, [Move(1, 1, (0,))]),
        ({0: [1, 2], 1: [1, 2]}, [0, 3], 2, [Move(0, 1, (0, 3)), Move(1, 2, (0, 3))]),
        ({0: [1, 2], 1: [1, 2]}, [0, 3], 1, [Move(0, 1, (0,)), Move(1, 2, (3,))]),
        ({0: [0, 1], 1: [0, 1]}, [0, 1, 2], 2, []),
    ],
    ids=["one stays", "all copies leave", "each takes some", "nothing is lacking"],
)
def test_states_go_to_those_that_stay_before_the_others_leave(
    holders: dict[int, list[int]], staying: list[int], num_copies: int, expected: list[Move]
) -> None:
    assert moves(holders, handed_over(holders, staying, num_copies), same_size) == expected
