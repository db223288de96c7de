"""Groups: workers that carry one model together, each a part of it.

With P parts, each worker has one part for its whole life. A **group** has one worker of each part, and computes
micro-batches; the workers of one part are a **lane**, and sum the gradients of that part. Who is left over, because a
worker of another part was lost, computes nothing until a replacement completes its group; it keeps its part up to date
with its lane. Decisions without I/O: every member decides the same, from the parts and numbers of all members and from
what all have reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from unisono.core.errors import StateLost
from unisono.core.plan import Plan, replan
from unisono.core.tree import Node

__all__ = [
    "Groups",
    "check_parts",
    "columns_of",
    "expand",
    "groups_of",
    "lane_of",
    "lanes_of",
    "parts_of",
    "place_words",
    "places",
    "plan_of_groups",
    "replan_groups",
]

Groups = tuple[tuple[int, ...], ...]
"""The ranks of each group, in the order of the parts."""


def groups_of(parts: Sequence[int], worker_ids: Sequence[str], num_parts: int) -> Groups:
    """Return the groups among the members, in the order of their lowest ranks; those left over are in none.

    Workers that were started next to each other, P at a time, come first: so a group stays together as long as it is
    complete, and lies on one host where the host was given a whole group.

    Args:
        parts: by rank.
    """
    if num_parts == 1:
        return tuple((rank,) for rank in range(len(parts)))
    blocks: dict[int, dict[int, int]] = {}
    for rank, (part, worker_id) in enumerate(zip(parts, worker_ids, strict=True)):
        blocks.setdefault(int(worker_id[1:]) // num_parts, {}).setdefault(part, rank)
    found = [tuple(block[part] for part in sorted(block)) for block in blocks.values() if len(block) == num_parts]
    used = {rank for group in found for rank in group}
    lanes = [[rank for rank in lane if rank not in used] for lane in lanes_of(parts, num_parts)]
    return tuple(sorted([*found, *zip(*lanes, strict=False)], key=min))


def columns_of(num_stages: int, num_parts: int) -> int:
    """Return how many of the processes of a group carry stages of their own: as many as possible.

    The processes are a grid; those of a column have the same stages, and different shards of the layers that are cut.
    """
    return max(number for number in range(1, num_stages + 1) if num_parts % number == 0)


def parts_of(num_stages: int, num_parts: int, num_shard_parts: int = 1) -> list[range]:
    """Return by part the stages that it carries: next to each other, and equally many as far as that goes.

    Args:
        num_shard_parts: so many neighbouring parts carry the same stages.
    """
    columns = num_parts // num_shard_parts
    edges = [column * num_stages // columns for column in range(columns + 1)]
    return [range(first, end) for first, end in itertools.pairwise(edges) for _ in range(num_shard_parts)]


def lanes_of(parts: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """Return by part the ranks of the members that carry it, ascending."""
    return [lane_of(parts, part) for part in range(num_parts)]


def check_parts(parts: Sequence[int], num_parts: int) -> None:
    """Raise StateLost if no member is left that carries some part.

    Args:
        parts: by rank.
    """
    for part in range(num_parts):
        if part not in parts:
            raise StateLost(f"no remaining worker carries part {part} of the {num_parts} parts of the model")


def lane_of(parts: Sequence[int], part: int) -> tuple[int, ...]:
    """Return the ranks of the members that carry a part, ascending."""
    return tuple(rank for rank, each in enumerate(parts) if each == part)


def expand(plan: Plan, groups: Groups, size: int) -> Plan:
    """Return the plan by rank, from one by group: all members of a group compute the same leaves.

    Args:
        size: number of members.
    """
    of = {rank: number for number, group in enumerate(groups) for rank in group}
    ranges = tuple(plan.ranges[of[rank]] if rank in of else () for rank in range(size))
    if not plan.kept:
        return Plan(plan.num_leaves, ranges)
    return Plan(plan.num_leaves, ranges, tuple(plan.kept[of[rank]] if rank in of else () for rank in range(size)))


def plan_of_groups(plan: Plan, groups: Groups) -> Plan:
    """Return the plan by group, from one by rank."""
    return Plan(plan.num_leaves, tuple(plan.ranges[group[0]] for group in groups))


def places(part: int, num_parts: int) -> tuple[int, int]:
    """Return the two places of a part in the order in which a group computes a micro-batch: forward, and back.

    What comes out at a place depends on what has come out at those before it. So of the places at which two groups have
    got other bits, the first one is that of a worker that was given the right bits.
    """
    return part, 2 * num_parts - 1 - part


def place_words(place: int, num_parts: int) -> str:
    """Return in words what comes out at a place (`places`)."""
    if place < num_parts:
        return f"the output of part {place} in"
    return f"the gradient of part {2 * num_parts - 1 - place} in"


def replan_groups(held: Sequence[Sequence[Node]], able: Sequence[bool], num_leaves: int, groups: Groups) -> Plan:
    """Return the plan of the missing leaves of a step that lost members. A node counts if its whole group has it.

    Where some members have finished the step, every other one has the sum of its lane
    (`unisono.engine.exchange.lanes`), and nothing is missing: nobody computes or brings anything.

    Args:
        held: by rank, the nodes that each member has finished.
        able: by rank; False: the member has finished the step.
    """
    size = len(held)
    if not all(able):
        return Plan(num_leaves, ((),) * size, ((),) * size)
    common = [sorted(set[Node].intersection(*(set(held[rank]) for rank in group))) for group in groups]
    return expand(replan(common, [True] * len(groups), num_leaves), groups, size)
