"""The tree alone decides the association of a sum."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core import tree
from unisono.core.tree import Node

MOST_LEAVES = 70
leaf_counts = st.integers(1, MOST_LEAVES)


def join(left: str, right: str) -> str:
    """An addition that remembers its association."""
    return f"({left}+{right})"


def reference(start: int, stop: int) -> str:
    """The association that is promised, written down independently: split at the largest power of two."""
    count = stop - start
    if count == 1:
        return str(start)
    half = 1 << (count - 1).bit_length() - 1
    return join(reference(start, start + half), reference(start + half, stop))


def one_by_one(num_leaves: int) -> dict[Node, str]:
    return {tree.leaf(index, num_leaves): str(index) for index in range(num_leaves)}


def all_nodes(num_leaves: int) -> set[Node]:
    levels = range(tree.root(num_leaves).level + 1)
    return {
        tree.canonical(Node(level, index), num_leaves)
        for level in levels
        for index in range(-(-num_leaves // (1 << level)))
    }


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A tree and its leaves cut into ranges, some of them perhaps empty."""
    num_leaves = draw(leaf_counts)
    edges = sorted([0, num_leaves, *draw(st.lists(st.integers(0, num_leaves), max_size=9))])
    return num_leaves, list(itertools.pairwise(edges))


@pytest.mark.parametrize("num_leaves", range(1, MOST_LEAVES + 1))
def test_the_association_is_the_promised_one(num_leaves: int) -> None:
    assert tree.fold(one_by_one(num_leaves), num_leaves, join) == reference(0, num_leaves)


@given(cut(), st.randoms(use_true_random=False))
def test_ranges_and_completion_order_do_not_change_the_association(
    case: tuple[int, list[tuple[int, int]]], shuffle: random.Random
) -> None:
    """Any workers, each with any range, done in any order: one sum."""
    num_leaves, ranges = case
    held: dict[Node, str] = {}
    for start, stop in ranges:
        # A worker folds its own leaves first, in the order in which it finished them.
        order = list(range(start, stop))
        shuffle.shuffle(order)
        own = {tree.leaf(index, num_leaves): str(index) for index in order}
        merges, rest = tree.schedule(own, num_leaves)
        for left, right, parent in merges:
            own[parent] = join(own.pop(left), own.pop(right))
        assert list(own) != [] or start == stop
        assert rest == tree.cover(start, stop, num_leaves)
        held.update(own)
    arrived = list(held.items())
    shuffle.shuffle(arrived)
    assert tree.fold(dict(arrived), num_leaves, join) == reference(0, num_leaves)


@given(leaf_counts, st.data())
def test_a_scattered_set_of_leaves_folds_to_the_same_sum(num_leaves: int, data: st.DataObject) -> None:
    """After a loss, nodes need not be contiguous: what survivors hold and what is redone meet all the same."""
    survivors = data.draw(st.sets(st.sampled_from(range(num_leaves))))
    held: dict[Node, str] = {}
    for part in (survivors, set(range(num_leaves)) - survivors):
        own = {tree.leaf(index, num_leaves): str(index) for index in part}
        merges, _ = tree.schedule(own, num_leaves)
        for left, right, parent in merges:
            own[parent] = join(own.pop(left), own.pop(right))
        held.update(own)
    assert tree.fold(held, num_leaves, join) == reference(0, num_leaves)


@given(leaf_counts, st.data())
def test_cover_is_exact(num_leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_leaves))
    stop = data.draw(st.integers(start, num_leaves))
    nodes = tree.cover(start, stop, num_leaves)
    assert list(itertools.chain.from_iterable(tree.leaves(node, num_leaves) for node in nodes)) == [*range(start, stop)]
    assert all(tree.canonical(node, num_leaves) == node for node in nodes)


@pytest.mark.parametrize("num_leaves", range(1, 21))
def test_cover_has_the_fewest_nodes(num_leaves: int) -> None:
    """Against a shortest path over all nodes, for every range."""
    spans = [tree.leaves(node, num_leaves) for node in all_nodes(num_leaves)]
    for start in range(num_leaves + 1):
        fewest = {start: 0}
        for stop in range(start + 1, num_leaves + 1):
            fewest[stop] = 1 + min(
                (fewest[span.start] for span in spans if span.stop == stop and span.start in fewest), default=10**6
            )
            assert len(tree.cover(start, stop, num_leaves)) == fewest[stop]


@pytest.mark.parametrize("num_leaves", range(1, 40))
def test_canonical_names_are_one_per_set_of_leaves(num_leaves: int) -> None:
    nodes = all_nodes(num_leaves)
    assert len({tree.leaves(node, num_leaves) for node in nodes}) == len(nodes) == 2 * num_leaves - 1
    for node in nodes:
        assert tree.canonical(node, num_leaves) == node
        other = tree.sibling(node, num_leaves)
        if other is None:
            assert node == tree.root(num_leaves)
            continue
        assert other in nodes
        assert tree.sibling(other, num_leaves) == node
        both = {*tree.leaves(node, num_leaves), *tree.leaves(other, num_leaves)}
        assert both == set(tree.leaves(tree.parent(node, num_leaves), num_leaves))


@given(leaf_counts, st.data())
def test_a_schedule_can_be_carried_out(num_leaves: int, data: st.DataObject) -> None:
    """Every merge takes two nodes that are there, left before right, and leaves nothing to merge."""
    given_leaves = data.draw(st.sets(st.sampled_from(range(num_leaves))))
    nodes = [tree.leaf(index, num_leaves) for index in given_leaves]
    merges, rest = tree.schedule(nodes, num_leaves)
    have = set(nodes)
    for left, right, parent in merges:
        assert {left, right} <= have
        assert tree.leaves(left, num_leaves).stop == tree.leaves(right, num_leaves).start
        assert tree.parent(left, num_leaves) == tree.parent(right, num_leaves) == parent
        have = have - {left, right} | {parent}
    assert have == set(rest)
    assert not any(tree.sibling(node, num_leaves) in have for node in have)
    starts = [tree.leaves(node, num_leaves).start for node in rest]
    assert starts == sorted(starts)


@pytest.mark.parametrize("values", [{Node(2, 0): "a"}, {Node(2, 0): "a", Node(1, 2): "b"}])
def test_fold_refuses_an_incomplete_sum(values: dict[Node, str]) -> None:
    """A sum with a hole in it must never look like a sum."""
    with pytest.raises(ValueError, match="do not cover each of 8 leaves exactly once"):
        tree.fold(values, 8, join)


def test_fold_refuses_a_leaf_that_is_there_twice() -> None:
    with pytest.raises(ValueError, match="do not cover each of 4 leaves exactly once"):
        tree.fold({Node(2, 0): "all", Node(0, 1): "again"}, 4, join)


def test_arguments_outside_the_tree_are_named() -> None:
    with pytest.raises(ValueError, match="at least 1 leaf, got 0"):
        tree.root(0)
    with pytest.raises(ValueError, match="leaf 8 is outside the tree of 8 leaves"):
        tree.leaf(8, 8)
    with pytest.raises(ValueError, match=r"leaves \[3, 9\) are outside the tree of 8 leaves"):
        tree.cover(3, 9, 8)
