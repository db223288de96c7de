"""Groups: what each process of a model in stages would hold, and how long a step takes at least.

Reckoned from one process that has had all stages (docs/memory.md has the formula): a process holds parameters, states
and sums of its own stages (of layers that are cut, its own shards), one slot more for the sum of its part, and the
activations of the micro-batches that are under way in it. These were measured of all stages together; each stage is
taken to have an equal share, and shards are taken to save none.

Of time only a bound is known, as if stages were equally long and messages took no time: with m micro-batches in a group
of p x t processes (p with stages of their own, each of whose layers t share out), a step has (m + p - 1) turns of a
(p t)-th of a micro-batch; and no machine is faster than its cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from unisono.core.errors import UsageError
from unisono.core.groups import columns_of, parts_of
from unisono.core.words import count
from unisono.tools.plan.forecast import Sample
from unisono.tools.plan.found import PROGRAM, WorkerFindings

__all__ = ["GroupForecast", "check_layouts", "forecast_groups", "sizes_of"]


class GroupForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of so many groups."""

    groups: int
    parts: int
    least_step_s: float
    """A step takes so long at least."""
    memory_bytes: list[int]
    """Of each process of a group, by part."""


def sizes_of(found: WorkerFindings) -> list[int]:
    """Return the sizes of groups that a model can have: powers of two, and the number of its stages."""
    most = len(found.stages) * found.shards
    doubled = itertools.takewhile(lambda size: size <= most, (2**power for power in itertools.count(1)))
    return sorted({size for size in (*doubled, len(found.stages)) if size > 1 and _fits(found, size)})


def check_layouts(layouts: Sequence[tuple[int, int]], found: WorkerFindings) -> None:
    """Check layouts, as (groups, processes of a group).

    Raises:
        UsageError: the model cannot be trained so.
    """
    for groups, parts in layouts:
        if not found.stages:
            raise UsageError(
                f"--workers {groups}x{parts} is about groups that carry a model in stages, and the script tracks no "
                "unisono.Stages: plan it with --workers N"
            )
        if not _fits(found, parts):
            cut = f" with layers in {found.shards} shards" if found.shards > 1 else ""
            raise UsageError(
                f"--workers {groups}x{parts}: unisono.Stages of the script has {count(len(found.stages), 'stage')}{cut}"
                ", and each process of a group carries stages or shards of its own: give more cuts, or smaller groups"
            )


def forecast_groups(
    found: WorkerFindings, sample: Sample, layouts: Sequence[tuple[int, int]], room: int
) -> list[GroupForecast]:
    """Return what is expected of some layouts, as (groups, processes of a group).

    Args:
        found, sample: of one process with all stages.
        room: processes that the machine has cores or GPUs for.
    """
    number = int(found.recipe["microbatches"])
    made = []
    for groups, parts in layouts:
        most = math.ceil(number / groups)
        turns = max((most + columns_of(len(found.stages), parts) - 1) / parts, number / room)
        made.append(
            GroupForecast(
                groups=groups,
                parts=parts,
                least_step_s=turns * sample.pace + sample.update / parts,
                memory_bytes=_memory(found, parts, most),
            )
        )
    return made


def _fits(found: WorkerFindings, parts: int) -> bool:
    """Return whether the processes of a group of this size can have stages or shards of their own."""
    return found.shards % (parts // columns_of(len(found.stages), parts)) == 0


def _memory(found: WorkerFindings, parts: int, microbatches: int) -> list[int]:
    """Return by part what a process holds, of a group that computes so many micro-batches at most."""
    columns = columns_of(len(found.stages), parts)
    sharing = parts // columns
    slots = microbatches.bit_length() + (parts > 1)  # sums, with the gradient of the current one; that of the part
    activations = max(0, found.peak - sum(found.parts.values())) / len(found.stages)
    made = []
    for part, own in enumerate(parts_of(len(found.stages), parts, sharing)):
        stages = [found.stages[stage] for stage in own]
        under_way = min(microbatches, columns - part // sharing)
        held = sum((one.held + one.states + one.gradient * slots) * (1 - one.cut + one.cut / sharing) for one in stages)
        made.append(round(found.parts.get(PROGRAM, 0) + held + activations * len(own) * under_way))
    return made
