"""The fixed summation tree of a step.

A step has ``num_leaves`` micro-batches. Node ``(level, index)`` covers the leaves
``[index * 2**level, (index + 1) * 2**level)`` that exist. Sums are only ever formed as
``left + right`` of two siblings, so the association of the whole sum depends on ``num_leaves``
alone: not on who computed which leaf, nor on the order in which they arrived.

A node whose sibling covers no leaf that exists *is* its parent (there is nothing to add).
Such a node is always written by its highest name; this module calls that **canonical**, and every
function here takes and returns canonical nodes. With 6 leaves::

    (3,0)                         the root
      (2,0)          (2,1)        (2,1) covers 4 and 5 only: canonical, its sibling (2,0) exists
    (1,0) (1,1)                   (1,2) would be the same sum as (2,1): not canonical
    0  1  2  3       4  5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

__all__ = [
    "Merge",
    "Node",
    "canonical",
    "cover",
    "fold",
    "leaf",
    "leaves",
    "level_of",
    "outermost",
    "parent",
    "root",
    "schedule",
    "sibling",
]

T = TypeVar("T")


class Node(NamedTuple):
    """An aligned subtree: covers leaves ``[index << level, (index + 1) << level)`` that exist."""

    level: int
    index: int  # type: ignore[assignment]  # hides a tuple's own `index`, which is not needed here


class Merge(NamedTuple):
    """One addition: ``parent = left + right``."""

    left: Node
    right: Node
    parent: Node


def root(num_leaves: int) -> Node:
    """Return the node that covers all leaves."""
    if num_leaves < 1:
        raise ValueError(f"a tree needs at least 1 leaf, got {num_leaves}")
    return Node((num_leaves - 1).bit_length(), 0)


def leaf(index: int, num_leaves: int) -> Node:
    """Return the canonical node that covers exactly leaf ``index``."""
    if not 0 <= index < num_leaves:
        raise ValueError(f"leaf {index} is outside the tree of {num_leaves} leaves")
    return canonical(Node(0, index), num_leaves)


def leaves(node: Node, num_leaves: int) -> range:
    """Return the leaves that ``node`` covers."""
    return range(node.index << node.level, min((node.index + 1) << node.level, num_leaves))


def level_of(num_nodes: int, num_leaves: int) -> int:
    """Return the lowest level at which the tree has at most ``num_nodes`` nodes."""
    return max(0, (-(-num_leaves // num_nodes) - 1).bit_length())


def canonical(node: Node, num_leaves: int) -> Node:
    """Return the highest node with the same leaves as ``node``."""
    top = root(num_leaves).level
    level, index = node
    while level < top and ((index ^ 1) << level) >= num_leaves:
        level, index = level + 1, index >> 1
    return Node(level, index)


def sibling(node: Node, num_leaves: int) -> Node | None:
    """Return the node that ``node`` is added to next; None for the root."""
    # A canonical node's sibling has a leaf, so it is canonical under the same level.
    return None if node == root(num_leaves) else Node(node.level, node.index ^ 1)


def parent(node: Node, num_leaves: int) -> Node:
    """Return the canonical node that ``node`` and its sibling sum to."""
    return canonical(Node(node.level + 1, node.index >> 1), num_leaves)


def cover(start: int, stop: int, num_leaves: int) -> list[Node]:
    """Return the fewest nodes that together cover exactly the leaves ``[start, stop)``, from left to right."""
    if not 0 <= start <= stop <= num_leaves:
        raise ValueError(f"leaves [{start}, {stop}) are outside the tree of {num_leaves} leaves")
    nodes = []
    while start < stop:
        level = (start & -start).bit_length() - 1 if start else root(num_leaves).level
        # The largest aligned node at `start` that ends inside the range, or at the tree's edge.
        while min(start + (1 << level), num_leaves) > stop:
            level -= 1
        nodes.append(canonical(Node(level, start >> level), num_leaves))
        start = min(start + (1 << level), num_leaves)
    return nodes


def schedule(nodes: Iterable[Node], num_leaves: int) -> tuple[list[Merge], list[Node]]:
    """Return the additions that the given nodes allow, in an order that can be carried out, and the nodes that remain.

    Returns:
        The merges (each names nodes that are given or that an earlier merge made) and the
        nodes that remain, from left to right; just the root if the nodes cover every leaf.
    """
    have = set(nodes)
    merges: list[Merge] = []
    # Lowest first: a merge can only enable one at a higher level.
    queue = sorted(have)
    while queue:
        node = queue.pop(0)
        other = sibling(node, num_leaves)
        if node not in have or other is None or other not in have:
            continue
        left, right = min(node, other), max(node, other)
        merged = parent(node, num_leaves)
        have -= {left, right}
        have.add(merged)
        merges.append(Merge(left, right, merged))
        queue.append(merged)
    return merges, sorted(have, key=lambda n: leaves(n, num_leaves).start)


def fold(values: Mapping[Node, T], num_leaves: int, add: Callable[[T, T], T]) -> T:
    """Return the root's value from values that cover every leaf once, added in tree order."""
    held = dict(values)
    merges, rest = schedule(held, num_leaves)
    if rest != [root(num_leaves)]:
        raise ValueError(f"nodes {sorted(values)} do not cover each of {num_leaves} leaves exactly once")
    for left, right, merged in merges:
        held[merged] = add(held.pop(left), held.pop(right))
    return held[root(num_leaves)]


def outermost(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that no other of them contains: disjoint, and with all the leaves of the others.

    Two nodes of a tree are disjoint, or one contains the other.
    """
    have = set(nodes)
    top = max((node.level for node in have), default=0)
    return {
        node
        for node in have
        if not any(Node(level, node.index >> (level - node.level)) in have for level in range(node.level + 1, top + 1))
    }
