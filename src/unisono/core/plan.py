"""Plans: which member computes which micro-batches of a step.

Every member gets a contiguous range of leaves. A range is the union of a few aligned nodes, and each
of them travels through the exchange by itself, so of all equally balanced plans the one with the
fewest nodes is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core.tree import Node, cover, leaf, leaves, schedule

__all__ = ["Plan", "plan", "replan"]


@dataclass(frozen=True)
class Plan:
    """Leaves and nodes of each member for one step, by rank."""

    num_leaves: int
    ranges: tuple[Sequence[int], ...]
    """The leaves that each rank computes, ascending; contiguous unless a loss left gaps."""
    kept: tuple[tuple[Node, ...], ...] = ()
    """By rank, the finished nodes that count; empty for a fresh step."""

    @functools.cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """By rank, the nodes of a member that has computed all of its leaves; together they cover every leaf once."""
        kept = self.kept or ((),) * len(self.ranges)
        return tuple(
            tuple(schedule([*held, *(leaf(index, self.num_leaves) for index in todo)], self.num_leaves)[1])
            for held, todo in zip(kept, self.ranges, strict=True)
        )


@functools.lru_cache(maxsize=256)
def plan(num_members: int, num_leaves: int) -> Plan:
    """Split ``num_leaves`` evenly over ``num_members``: sizes differ by at most one leaf.

    Members beyond the number of leaves get an empty range. Pure: every member computes the same plan.
    """
    if num_members < 1 or num_leaves < 1:
        raise ValueError(f"a plan needs at least 1 member and 1 leaf, got {num_members} and {num_leaves}")
    small, num_big = divmod(num_leaves, num_members)
    sizes = _order_of_sizes(num_members, num_big, small, num_leaves)
    ranges, start = [], 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return Plan(num_leaves, tuple(ranges))


def replan(held: Sequence[Sequence[Node]], able: Sequence[bool], num_leaves: int) -> Plan:
    """Return the plan of the missing leaves of a step that lost members. Finished nodes of all members count.

    Args:
        held: by rank of the new generation, the nodes that each member has finished. They may overlap (two
            members computed the same leaf): the larger node counts, then the lower rank's.
        able: which members can compute leaves of this step; at least one.

    Pure: every member computes the same plan from what all have reported.
    """
    if not any(able):
        raise ValueError("no member can compute the step")
    kept: list[list[Node]] = [[] for _ in held]
    absent = set(range(num_leaves))
    offers = [(-len(leaves(node, num_leaves)), rank, node) for rank, nodes in enumerate(held) for node in nodes]
    for _, rank, node in sorted(offers):
        covered = set(leaves(node, num_leaves))
        if covered <= absent:
            absent -= covered
            kept[rank].append(node)
    workers = [rank for rank, can in enumerate(able) if can]
    gaps = sorted(absent)
    ranges: list[tuple[int, ...]] = [()] * len(held)
    for index, rank in enumerate(workers):
        ranges[rank] = tuple(gaps[len(gaps) * index // len(workers) : len(gaps) * (index + 1) // len(workers)])
    return Plan(num_leaves, tuple(ranges), tuple(tuple(nodes) for nodes in kept))


def _order_of_sizes(num_members: int, num_big: int, small: int, num_leaves: int) -> list[int]:
    """Return the order of sizes with the fewest nodes: ``num_big`` times ``small + 1`` leaves, else ``small`` leaves.

    Where a range starts depends only on how many ranges, and how many big ones, stand before it:
    a shortest path over a grid of (members placed, big ones placed).
    """
    if num_big == 0 or small == 0:
        return [small + 1] * num_big + [small] * (num_members - num_big)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for placed in range(num_members):
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for bigs, (cost, sizes) in best.items():
            start = placed * small + bigs
            for big in (1, 0):
                if bigs + big > num_big or placed + 1 - bigs - big > num_members - num_big:
                    continue
                size = small + big
                option = (cost + len(cover(start, start + size, num_leaves)), (*sizes, size))
                held = after.get(bigs + big)
                if held is None or option[0] < held[0]:
                    after[bigs + big] = option
        best = after
    return list(best[num_big][1])
