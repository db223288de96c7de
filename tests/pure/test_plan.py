"""A plan is even, contiguous, complete, and has as few nodes as an even plan can have."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core import tree
from unisono.core.plan import plan, replan
from unisono.core.tree import Node


@given(st.integers(1, 80), st.integers(1, 200))
def test_every_leaf_is_computed_exactly_once(num_members: int, num_leaves: int) -> None:
    ranges = plan(num_members, num_leaves).ranges
    assert len(ranges) == num_members
    assert list(itertools.chain.from_iterable(ranges)) == list(range(num_leaves))


@given(st.integers(1, 80), st.integers(1, 200))
def test_no_member_has_two_leaves_more_than_another(num_members: int, num_leaves: int) -> None:
    sizes = [len(own) for own in plan(num_members, num_leaves).ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 20), st.integers(1, 64))
def test_the_nodes_of_all_members_sum_to_the_root(num_members: int, num_leaves: int) -> None:
    made = plan(num_members, num_leaves)
    nodes = list(itertools.chain.from_iterable(made.nodes))
    assert leaves_of(nodes, num_leaves) == [*range(num_leaves)]
    assert tree.schedule(nodes, num_leaves)[1] == [tree.root(num_leaves)]


def leaves_of(nodes: list[Node], num_leaves: int) -> list[int]:
    return sorted(leaf for node in nodes for leaf in tree.leaves(node, num_leaves))


def nodes_of(sizes: tuple[int, ...], num_leaves: int) -> int:
    edges = [0, *itertools.accumulate(sizes)]
    return sum(len(tree.cover(start, stop, num_leaves)) for start, stop in itertools.pairwise(edges))


@pytest.mark.parametrize("num_leaves", range(1, 19))
def test_no_even_plan_has_fewer_nodes(num_leaves: int) -> None:
    """Against all orders of the sizes."""
    for num_members in range(1, 9):
        small, num_big = divmod(num_leaves, num_members)
        orders = itertools.combinations(range(num_members), num_big)
        fewest = min(
            nodes_of(tuple(small + (rank in big) for rank in range(num_members)), num_leaves) for big in orders
        )
        made = plan(num_members, num_leaves)
        assert sum(map(len, made.nodes)) == fewest


@pytest.mark.parametrize(("num_members", "num_leaves"), [(2, 8), (4, 8), (8, 8), (4, 64), (16, 64)])
def test_a_power_of_two_needs_one_node_a_member(num_members: int, num_leaves: int) -> None:
    made = plan(num_members, num_leaves)
    assert [len(nodes) for nodes in made.nodes] == [1] * num_members


def test_members_beyond_the_leaves_idle() -> None:
    assert [len(own) for own in plan(5, 3).ranges] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(("num_members", "num_leaves"), [(0, 4), (4, 0), (-1, 4)])
def test_a_plan_without_members_or_leaves_is_refused(num_members: int, num_leaves: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_members} and {num_leaves}"):
        plan(num_members, num_leaves)


def nodes_over(leaves: set[int], num_leaves: int) -> list[Node]:
    """What a member holds that has computed these leaves."""
    return tree.schedule([tree.leaf(index, num_leaves) for index in leaves], num_leaves)[1]


@st.composite
def broken_steps(draw: st.DrawFn) -> tuple[list[list[Node]], list[bool], int]:
    """A step in which members were lost: what each survivor has finished (perhaps twice), and who can compute."""
    num_leaves = draw(st.integers(1, 40))
    members = draw(st.integers(1, 8))
    some_leaves = st.sets(st.sampled_from(range(num_leaves)))
    held = [nodes_over(draw(some_leaves), num_leaves) for _ in range(members)]
    able = draw(st.lists(st.booleans(), min_size=members, max_size=members).filter(any))
    return held, able, num_leaves


@given(broken_steps())
def test_a_new_plan_completes_the_step(case: tuple[list[list[Node]], list[bool], int]) -> None:
    """Every leaf once, whatever was finished, lost or done twice."""
    held, able, num_leaves = case
    made = replan(held, able, num_leaves)
    nodes = list(itertools.chain.from_iterable(made.nodes))
    assert leaves_of(nodes, num_leaves) == [*range(num_leaves)]
    assert tree.schedule(nodes, num_leaves)[1] == [tree.root(num_leaves)]


@given(broken_steps())
def test_a_new_plan_computes_only_what_nobody_has(case: tuple[list[list[Node]], list[bool], int]) -> None:
    """Finished work counts wherever a whole node of it fits."""
    held, able, num_leaves = case
    made = replan(held, able, num_leaves)
    assert all(set(kept) <= set(own) for kept, own in zip(made.kept, held, strict=True))
    assert all(not todo or can for todo, can in zip(made.ranges, able, strict=True))
    finished = {index for own in held for node in own for index in tree.leaves(node, num_leaves)}
    todo = set(itertools.chain.from_iterable(made.ranges))
    assert set(range(num_leaves)) - finished <= todo
    again = [node for own in held for node in own if set(tree.leaves(node, num_leaves)) <= todo]
    assert again == []


@given(broken_steps())
def test_a_new_plan_is_even(case: tuple[list[list[Node]], list[bool], int]) -> None:
    held, able, num_leaves = case
    made = replan(held, able, num_leaves)
    sizes = [len(todo) for todo, can in zip(made.ranges, able, strict=True) if can]
    assert max(sizes) - min(sizes) <= 1


@given(broken_steps(), st.data())
def test_a_member_lost_while_it_redoes_costs_its_part_only(
    case: tuple[list[list[Node]], list[bool], int], data: st.DataObject
) -> None:
    """A second loss during the recovery: what the others finished since then counts as well."""
    held, able, num_leaves = case
    made = replan(held, able, num_leaves)
    lost = data.draw(st.integers(0, len(held) - 1))
    later = [list(nodes) for rank, nodes in enumerate(made.nodes) if rank != lost]
    if not later:
        return
    again = replan(later, [True] * len(later), num_leaves)
    redone = set(itertools.chain.from_iterable(again.ranges))
    assert redone == {index for node in made.nodes[lost] for index in tree.leaves(node, num_leaves)}


def test_without_a_loss_there_is_nothing_to_do() -> None:
    calm = plan(3, 8)
    made = replan([list(nodes) for nodes in calm.nodes], [True] * 3, 8)
    assert made.ranges == ((), (), ())
    assert [set(nodes) for nodes in made.nodes] == [set(nodes) for nodes in calm.nodes]


def test_a_step_that_nobody_can_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="no member can"):
        replan([[], []], [False, False], 8)
