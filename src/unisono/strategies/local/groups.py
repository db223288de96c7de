"""Groups of local steps: which members compute a replica together. Decisions without I/O.

Where there are more members than replicas to compute, each replica is computed by a **group**. Its members share the
micro-batches of every step, so they exchange gradients in every step; members of one host do that at little cost. A
group spans hosts only where the run has fewer replicas than hosts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core.plan import Plan

__all__ = ["Grouping", "groups_of"]


@dataclass(frozen=True)
class Grouping:
    """Who computes which replicas in one round, and who hands them in."""

    plan: Plan
    """Each replica is a leaf of one member: of the first one of its group."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The ranks of each group, ascending, where members compute together; empty: each computes by itself."""

    def replicas(self, rank: int) -> Sequence[int]:
        """Return the replicas that a member computes, alone or with others."""
        group = self.group_of(rank)
        return self.plan.ranges[group[0]] if group else self.plan.ranges[rank]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group of a member; empty if it computes by itself, or nothing."""
        return next((group for group in self.groups if rank in group), ())


def groups_of(plan: Plan, hosts: Sequence[str], able: Sequence[bool] = ()) -> Grouping:
    """Return the groups for the replicas that a plan gives to members.

    Args:
        plan: of the round: whatever has to be computed is a leaf of some member.
        hosts: by rank; members of one host stand together.
        able: by rank, whether the member can compute replicas of this round; default: all.
    """
    todo = sorted(itertools.chain.from_iterable(plan.ranges))
    free = [rank for rank in range(len(hosts)) if not able or able[rank]]
    if not todo or len(free) <= len(todo):
        return Grouping(plan)
    by_host = [list(ranks) for _, ranks in itertools.groupby(free, key=lambda rank: hosts[rank])]
    if len(by_host) > len(todo) and len(set(hosts)) > plan.num_leaves:
        groups = [tuple(itertools.chain.from_iterable(part)) for part in _split(by_host, len(todo))]
    else:
        groups = _on_hosts(by_host, len(todo))
    ranges: list[Sequence[int]] = [()] * len(hosts)
    for replica, group in zip(todo, groups, strict=True):
        ranges[group[0]] = (replica,)
    return Grouping(Plan(plan.num_leaves, tuple(ranges), plan.kept), tuple(groups))


def _on_hosts(by_host: Sequence[list[int]], number: int) -> list[tuple[int, ...]]:
    """Return so many groups, none of which spans hosts: first one for each host, then for whoever has most members.

    With more hosts than groups, the hosts with the most members get them.
    """
    counts = [0] * len(by_host)
    largest = sorted(range(len(by_host)), key=lambda index: (-len(by_host[index]), index))
    for index in largest[:number]:
        counts[index] = 1
    for _ in range(number - sum(counts)):
        index = max(range(len(by_host)), key=lambda index: (len(by_host[index]) / (counts[index] + 1), -index))
        counts[index] += 1
    return [
        tuple(ranks[len(ranks) * part // count : len(ranks) * (part + 1) // count])
        for ranks, count in zip(by_host, counts, strict=True)
        for part in range(count)
    ]


def _split(by_host: Sequence[list[int]], number: int) -> list[Sequence[list[int]]]:
    """Return the hosts cut into so many parts, next to each other, with members as equal as whole hosts allow."""
    sizes = [len(ranks) for ranks in by_host]
    ends = list(itertools.accumulate(sizes))
    edges = [0]
    for part in range(1, number):
        wanted = ends[-1] * part / number
        first, last = edges[-1] + 1, len(sizes) - (number - part)
        edges.append(min(range(first, last + 1), key=lambda edge: abs(ends[edge - 1] - wanted)))
    return [by_host[a:b] for a, b in itertools.pairwise([*edges, len(sizes)])]
