"""Where the copies of the replicas' states go."""

from __future__ import annotations

import itertools

import pytest

from unisono.core.copies import Move, copies, deliveries, handed_over, holders_after


def test_who_computes_a_replica_gets_its_state_from_the_first_that_has_it() -> None:
    holders = {0: (0, 1), 1: (1,), 2: (2,)}
    assert deliveries(holders, [(0, 1), (), (2,)]) == [Move(1, 1, (0,))]
    assert deliveries(holders, [(), (), (0, 1, 2)]) == [Move(0, 0, (2,)), Move(1, 1, (2,))]
    assert deliveries(holders, [(2,), (2,), (2,)]) == [Move(2, 2, (0, 1))], "once, to all who compute it together"


def test_each_state_has_its_copies_and_no_member_many_more_than_the_others() -> None:
    for workers, replicas, num in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 4, 8), (1, 2, 3)):
        holders = {replica: (replica % workers,) for replica in range(replicas)}
        after = holders_after(holders, copies(holders, [""] * workers, num))
        assert all(len(having) == min(num, workers) for having in after.values())
        loads = [sum(rank in having for having in after.values()) for rank in range(workers)]
        assert max(loads) <= -(-sum(loads) // workers) + 1


def test_copies_are_on_different_hosts_where_there_are_several() -> None:
    hosts = ["a", "a", "b", "b"]
    assert copies({0: (0,), 1: (2,)}, hosts, 2) == [Move(0, 0, (3,)), Move(1, 2, (1,))]
    # Two copies on one host do not survive that host.
    assert copies({0: (0, 1)}, hosts, 2) == [Move(0, 0, (2,))]
    assert copies({0: (0, 1)}, ["a", "a"], 2) == []
    assert copies({0: (0, 2)}, hosts, 2) == []
    assert copies({0: (0,)}, ["a", "b"], 3) == [Move(0, 0, (1,))]


def test_one_copy_moves_nothing() -> None:
    assert copies({0: (0,), 1: (1,)}, ["a", "b"], 1) == []


@pytest.mark.parametrize(
    ("holders", "staying", "num_copies", "moves"),
    [
        ({0: [0, 1], 1: [1, 2]}, [0], 2, [Move(1, 1, (0,))]),
        ({0: [1, 2], 1: [1, 2]}, [0, 3], 2, [Move(0, 1, (0, 3)), Move(1, 1, (0, 3))]),
        ({0: [1, 2], 1: [1, 2]}, [0, 3], 1, [Move(0, 1, (0,)), Move(1, 1, (3,))]),
        ({0: [0, 1], 1: [0, 1]}, [0, 1, 2], 2, []),
    ],
    ids=["one stays", "all copies leave", "each takes some", "nothing is lacking"],
)
def test_states_go_to_those_that_stay_before_the_others_leave(
    holders: dict[int, list[int]], staying: list[int], num_copies: int, moves: list[Move]
) -> None:
    assert handed_over(holders, staying, num_copies) == moves
