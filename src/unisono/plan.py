"""Who computes which micro-batches of a step.

Every member gets a contiguous range of leaves. A range is the union of a few aligned nodes, and each
of them travels through the exchange by itself, so of all equally balanced plans the one with the
fewest nodes is taken.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from unisono.tree import Node, cover

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """The ranges of one step, by rank. Rank ``r`` computes leaves ``ranges[r]``."""

    num_leaves: int
    ranges: tuple[range, ...]

    def nodes(self, rank: int) -> list[Node]:
        """The nodes that rank holds when it has computed all of its leaves."""
        own = self.ranges[rank]
        return cover(own.start, own.stop, self.num_leaves)


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


def _order_of_sizes(num_members: int, num_big: int, small: int, num_leaves: int) -> list[int]:
    """The order of ``num_big`` ranges of ``small + 1`` leaves among the others with the fewest nodes in all.

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
