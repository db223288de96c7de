"""Which members form groups, and what they compute again after a loss: tables, and rules that hold for any members."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.groups import Groups, expand, groups_of, lane_of, lanes_of, replan_groups
from unisono.core.plan import plan, replan
from unisono.core.tree import Node, cover, leaf, leaves, root, schedule

TABLE: list[tuple[str, int, str, str]] = [
    # what; parts of a group; members by rank, as id:part; groups of ranks, in the order of the parts
    ("one part: everybody is a group", 1, "w0:0 w1:0 w5:0", "0 | 1 | 2"),
    ("as they were started", 2, "w0:0 w1:1 w2:0 w3:1", "0 1 | 2 3"),
    ("four to a group", 4, "w0:0 w1:1 w2:2 w3:3 w4:0 w5:1 w6:2 w7:3", "0 1 2 3 | 4 5 6 7"),
    ("one is lost: the other of its group is left over", 2, "w1:1 w2:0 w3:1", "1 2"),
    ("its replacement completes the group, whatever its rank", 2, "w1:1 w2:0 w3:1 w4:0", "3 0 | 1 2"),
    ("one of each group is lost: those left over meet", 2, "w0:0 w3:1", "0 1"),
    ("the same part is lost in both groups", 2, "w1:1 w3:1", ""),
    ("a whole group is lost", 3, "w3:0 w4:1 w5:2", "0 1 2"),
    ("each of three groups has lost another part", 3, "w1:1 w2:2 w3:0 w5:2 w6:0 w7:1", "2 0 1 | 4 5 3"),
    ("ranks are not in the order of the ids", 2, "w3:1 w2:0 w1:1 w0:0", "1 0 | 3 2"),
    ("a group that was started by two machines", 3, "w0:0 w1:1 w3:2 w4:0 w2:1 w5:2", "0 1 2 | 3 4 5"),
    ("nobody has the last part", 3, "w0:0 w1:1 w3:0 w4:1", ""),
    ("nobody is there", 2, "", ""),
]

members = st.integers(2, 4).flatmap(
    lambda parts: st.tuples(
        st.just(parts),
        st.lists(st.tuples(st.integers(0, 19), st.integers(0, parts - 1)), max_size=12, unique_by=lambda one: one[0]),
    )
)
"""(parts of a group, by rank: (number of the worker, its part))."""


def grouped(text: str) -> Groups:
    return tuple(tuple(map(int, group.split())) for group in text.split("|") if group.strip())


@pytest.mark.parametrize(
    ("num_parts", "given_members", "expected"), [each[1:] for each in TABLE], ids=[each[0] for each in TABLE]
)
def test_groups(num_parts: int, given_members: str, expected: str) -> None:
    pairs = [word.split(":") for word in given_members.split()]
    assert groups_of([int(part) for _, part in pairs], [one for one, _ in pairs], num_parts) == grouped(expected)


@given(members)
def test_there_are_as_many_groups_as_the_rarest_part_has_members(some: tuple[int, list[tuple[int, int]]]) -> None:
    """Each has one member of each part, in the order of the parts; nobody is in two; the lowest ranks come first."""
    num_parts, found = some
    parts = [part for _, part in found]
    groups = groups_of(parts, [f"w{number}" for number, _ in found], num_parts)
    assert len(groups) == min(parts.count(part) for part in range(num_parts))
    assert all([parts[rank] for rank in group] == [*range(num_parts)] for group in groups)
    ranks = list(itertools.chain.from_iterable(groups))
    assert len(set(ranks)) == len(ranks)
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)


@given(members)
def test_a_complete_group_stays_together_whoever_else_is_lost(some: tuple[int, list[tuple[int, int]]]) -> None:
    """Among others, the workers of a group that were started together."""
    num_parts, others = some
    whole = [(100 * num_parts + part, part) for part in range(num_parts)]
    found = [*others, *whole]
    groups = groups_of([part for _, part in found], [f"w{number}" for number, _ in found], num_parts)
    assert tuple(range(len(others), len(found))) in groups


@given(members)
def test_lanes_are_the_members_of_each_part(some: tuple[int, list[tuple[int, int]]]) -> None:
    num_parts, found = some
    parts = [part for _, part in found]
    lanes = lanes_of(parts, num_parts)
    assert sorted(itertools.chain.from_iterable(lanes)) == list(range(len(parts)))
    assert lanes == [lane_of(parts, part) for part in range(num_parts)]
    assert all(parts[rank] == part for part, lane in enumerate(lanes) for rank in lane)
    assert all(list(lane) == sorted(lane) for lane in lanes)


# -- plans -------------------------------------------------------------------------------------------


def test_all_members_of_a_group_compute_the_same_and_those_left_over_nothing() -> None:
    assert expand(plan(2, 8), ((0, 3), (1, 2)), 5).ranges == (range(4), range(4, 8), range(4, 8), range(4), ())
    assert expand(plan(2, 8), ((0, 3), (1, 2)), 5).kept == ()


def test_with_one_part_the_plan_is_that_of_the_members() -> None:
    assert expand(plan(3, 8), ((0,), (1,), (2,)), 3) == plan(3, 8)


def test_a_node_of_which_a_member_of_the_group_lacks_its_part_is_computed_again() -> None:
    """Rank 1 had not got to micro-batch 1 in its backward; ranks 2 and 3 have finished theirs."""
    first, second = leaf(0, 4), leaf(1, 4)
    right = Node(1, 1)
    found = replan_groups([[Node(1, 0)], [first], [right], [right]], [True] * 4, 4, ((0, 1), (2, 3)))
    assert found.kept == ((), (), (right,), (right,))
    assert found.ranges == ((0,), (0,), (1,), (1,))
    found = replan_groups([[first, second], [first], [right], [right]], [True] * 4, 4, ((0, 1), (2, 3)))
    assert found.kept == ((first,), (first,), (right,), (right,))
    assert sorted(found.ranges[0] + found.ranges[2]) == [1]


def test_what_those_left_over_hold_counts_for_nothing() -> None:
    """The other half of what they have computed is lost with its worker."""
    found = replan_groups([[Node(1, 0)], [], [], []], [True] * 4, 4, ((1, 2),))
    assert found.ranges == ((), (0, 1, 2, 3), (0, 1, 2, 3), ())
    assert found.kept == ((), (), (), ())


@pytest.mark.parametrize("done", [[0], [3], [0, 1, 2, 3]])
def test_when_somebody_has_finished_the_step_nobody_computes(done: list[int]) -> None:
    held = [[root(4)], [], [leaf(2, 4)], []]
    found = replan_groups(held, [rank not in done for rank in range(4)], 4, ((0, 1), (2, 3)))
    assert found.ranges == ((),) * 4
    assert not any(found.nodes)


@given(st.data())
def test_after_any_loss_every_lane_has_each_micro_batch_once(data: st.DataObject) -> None:
    """Whatever the members have finished; and they form the same nodes in every lane."""
    num_leaves, num_parts = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 4))
    num_groups, num_more = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    size = num_groups * num_parts + num_more
    order = data.draw(st.permutations(range(size)))
    groups = tuple(tuple(order[n * num_parts : (n + 1) * num_parts]) for n in range(num_groups))
    held = []
    for _ in range(size):
        edges = sorted(data.draw(st.lists(st.integers(0, num_leaves), min_size=2, max_size=2)))
        held.append(cover(edges[0], edges[1], num_leaves))
    found = replan_groups(held, [True] * size, num_leaves, groups)
    for part in range(num_parts):
        lane = [group[part] for group in groups]
        nodes = [node for rank in lane for node in found.nodes[rank]]
        assert sorted(one for node in nodes for one in leaves(node, num_leaves)) == [*range(num_leaves)]
        assert schedule(nodes, num_leaves)[1] == [root(num_leaves)]
        assert [found.nodes[rank] for rank in lane] == [found.nodes[group[0]] for group in groups]
    for group in groups:
        assert all(set(found.kept[rank]) <= set(held[rank]) for rank in group)
    left = set(range(size)).difference(*groups)
    assert not any(found.ranges[rank] or found.kept[rank] for rank in left)


@given(st.integers(1, 16), st.integers(1, 4), st.data())
def test_with_one_part_it_is_the_plan_of_the_members(num_leaves: int, size: int, data: st.DataObject) -> None:
    held = []
    for _ in range(size):
        edges = sorted(data.draw(st.lists(st.integers(0, num_leaves), min_size=2, max_size=2)))
        held.append(cover(edges[0], edges[1], num_leaves))
    groups = tuple((rank,) for rank in range(size))
    assert replan_groups(held, [True] * size, num_leaves, groups) == replan(held, [True] * size, num_leaves)
