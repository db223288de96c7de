"""A plan is even, contiguous, complete, and has as few nodes as an even plan can have."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import tree
from unisono.plan import plan


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
    nodes = [node for rank in range(num_members) for node in made.nodes(rank)]
    assert tree.missing(nodes, num_leaves) == []
    assert tree.schedule(nodes, num_leaves)[1] == [tree.root(num_leaves)]


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
        assert sum(len(made.nodes(rank)) for rank in range(num_members)) == fewest


@pytest.mark.parametrize(("num_members", "num_leaves"), [(2, 8), (4, 8), (8, 8), (4, 64), (16, 64)])
def test_a_power_of_two_needs_one_node_a_member(num_members: int, num_leaves: int) -> None:
    made = plan(num_members, num_leaves)
    assert [len(made.nodes(rank)) for rank in range(num_members)] == [1] * num_members


def test_members_beyond_the_leaves_idle() -> None:
    assert [len(own) for own in plan(5, 3).ranges] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(("num_members", "num_leaves"), [(0, 4), (4, 0), (-1, 4)])
def test_a_plan_without_members_or_leaves_is_refused(num_members: int, num_leaves: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_members} and {num_leaves}"):
        plan(num_members, num_leaves)
