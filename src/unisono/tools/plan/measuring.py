"""What a run's files say about its steps, as the samples that a forecast is made from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unisono.core.errors import UsageError
from unisono.core.rehearsals import is_compared
from unisono.core.telemetry import PARTS
from unisono.record.history import History
from unisono.record.journal.times import by_step
from unisono.record.rundir import read_facts
from unisono.tools.plan.forecast import ForecastInputs, Sample
from unisono.tools.plan.found import IN_A_ROW, IN_A_ROW_ALONE, NUM_COUNTED, WARM_UP

__all__ = [
    "check_recipe",
    "facts_from",
    "facts_of_run",
    "hosts_in",
    "sample_of",
    "samples_in",
]

_AS_STANDARD_DEVIATION: Final = 1.4826
"""Of the median distance from the median, for normal numbers."""
_OF_A_MEDIAN: Final = 1.2533
"""Standard error of a median, as a multiple of that of a mean."""

Times = Mapping[str, Mapping[str, float | None]]
"""Of one step: by worker, its times by name."""


def samples_in(directory: Path, first: int = 0) -> list[Sample]:
    """Return a sample for each number of workers, and of their hosts, of which the run has kept enough steps.

    Steps at which several workers compare their bits do not count: most of them are rehearsals, with a micro-batch more
    for each worker, and there are many at the beginning of a run and few afterwards. The last steps of ``run.steps``,
    some of which are compared as well, do count: the files do not say which steps those are.

    Args:
        first: the first step that counts.
    """
    place = hosts_in(directory)
    found: dict[tuple[int, int], list[Times]] = {}
    before: tuple[str, ...] = ()
    left_out = 0
    for step, times in sorted(by_step(directory).items()):
        if step < first:
            continue
        members = tuple(times)
        left_out = left_out + 1 if members == before else 1
        before = members
        compares = len(members) > 1 and is_compared(step)
        if left_out > WARM_UP and not compares and _is_whole(times):
            hosts = len({place.get(worker_id, "") for worker_id in members})
            found.setdefault((len(members), hosts), []).append(times)
    return [
        sample_of(steps, workers, hosts)
        for (workers, hosts), steps in sorted(found.items())
        if len(steps) >= NUM_COUNTED
    ]


def facts_of_run(directory: Path, samples: Sequence[Sample], room: int) -> ForecastInputs:
    """Return what a forecast is made from, of a run.

    Args:
        room: workers that one of its machines has room for.

    Raises:
        UsageError: the run has not done enough steps, or trains in another way than a plain ``run.steps``.
    """
    facts = read_facts(directory)
    recipe, size = facts.get("recipe") or {}, facts.get("size") or {}
    check_recipe(recipe)
    if not samples or not any(one.hosts == 1 for one in samples):
        raise UsageError(
            f"the run in {directory} has not done enough steps with workers of one machine for a plan: {IN_A_ROW} from "
            f"its beginning, or {IN_A_ROW_ALONE} in a row later or with one worker"
        )
    if not isinstance(size.get("gradient_bytes"), int):
        raise UsageError(f"the run in {directory} does not record how large its gradients are; plan its script instead")
    return facts_from(samples, recipe, size, room)


def facts_from(
    samples: Sequence[Sample], recipe: Mapping[str, Any], size: Mapping[str, Any], room: int
) -> ForecastInputs:
    """Return what a forecast is made from, of a training with this recipe.

    Args:
        size: of the training: ``gradient_bytes``, of one node of the summation tree before it is rounded for its way;
            ``parameter_bytes``; and ``is_sharded``.
    """
    is_rounded = recipe.get("wire") == "bf16"
    return ForecastInputs(
        samples=tuple(samples),
        microbatches=int(recipe["microbatches"]),
        batch_size=int(recipe["batch_size"]),
        gradient_bytes=size["gradient_bytes"] // (2 if is_rounded else 1),
        parameter_bytes=size["parameter_bytes"],
        room=room,
        is_rounded=is_rounded,
        is_sharded=bool(size.get("is_sharded")),
    )


def check_recipe(recipe: Mapping[str, object]) -> None:
    """Raise UsageError unless it is that of a plain ``run.steps``."""
    if "replicas" in recipe:
        raise UsageError("plans are made from run.steps, but this script calls run.local_steps. Plan it with run.steps")
    if recipe.get("delay"):
        raise UsageError("plans are made from run.steps without a delay, but this script has one. Plan it without")
    if "microbatches" not in recipe:
        raise UsageError("the run does not record how many micro-batches make a batch")


def hosts_in(directory: Path) -> dict[str, str]:
    """Return on which host each worker of a run was, by its id, as far as the run's story tells it."""
    story = History(directory).every_event()
    return {str(each["worker_id"]): str(each.get("host", "")) for each in story if each.get("kind") == "joined"}


def sample_of(steps: Sequence[Times], workers: int, hosts: int = 1) -> Sample:
    """Return the sample of some steps of the same number of workers. Seconds."""
    whole = [max(_sum(each) for each in step.values()) for step in steps]
    median = statistics.median(whole)
    return Sample(
        workers=workers,
        hosts=hosts,
        step=median,
        spread=1.96 * _OF_A_MEDIAN * _deviation(whole) / math.sqrt(len(whole)) / median,
        pace=statistics.median(statistics.fmean(_paces(step)) for step in steps),
        scatter=_scatter(steps),
        exchange=_part(steps, "exchange"),
        update=_part(steps, "update"),
    )


def _is_whole(step: Times) -> bool:
    """Return whether all of it is known.

    A worker may have had no micro-batch: its sums would have travelled for too long.
    """
    known = all(times.get(name) is not None for times in step.values() for name in PARTS)
    return known and any(times.get("leaves") for times in step.values())


def _sum(times: Mapping[str, float | None]) -> float:
    return sum(times[name] or 0.0 for name in PARTS)


def _paces(step: Times) -> list[float]:
    """Return those of the workers that had micro-batches."""
    busy = [(each, leaves) for each in step.values() if (leaves := each["leaves"])]
    return [((each["data"] or 0.0) + (each["compute"] or 0.0)) / leaves for each, leaves in busy]


def _part(steps: Sequence[Times], name: str) -> float:
    return statistics.median(statistics.fmean(each[name] or 0.0 for each in step.values()) for step in steps)


def _scatter(steps: Sequence[Times]) -> float:
    """Return the standard deviation of a worker's time for its share, over that time: among the workers of a step, for
    what makes all of them slower makes nobody wait; alone, among its steps.
    """
    paces = [_paces(step) for step in steps]
    several = [step for step in paces if len(step) > 1]
    if not several:
        alone = [own for (own,) in paces]
        return _deviation(alone) / statistics.median(alone)
    apart = [
        (one - statistics.fmean(step)) / statistics.fmean(step) * math.sqrt(len(step) / (len(step) - 1))
        for step in several
        for one in step
    ]
    return _AS_STANDARD_DEVIATION * statistics.median(map(abs, apart))


def _deviation(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return _AS_STANDARD_DEVIATION * statistics.median(abs(one - middle) for one in values)
