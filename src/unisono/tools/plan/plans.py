"""A plan: the forecasts for some numbers of workers, what follows from them, and the file that keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from unisono.core.errors import UsageError
from unisono.core.words import listed
from unisono.record.rundir import PLAN_FILE
from unisono.system.owned import read_regular
from unisono.tools.plan.forecast import ForecastInputs, Parts, Roster, Sample, candidates, forecast
from unisono.tools.plan.layouts import GroupForecast
from unisono.tools.plan.strategy_models import STRATEGIES, StrategyOptions, WorkerMemory
from unisono.tools.plan.wires import NetworkLink

__all__ = [
    "Came",
    "Forecast",
    "PlanRecord",
    "best_microbatches",
    "came",
    "differs",
    "forecasts",
    "read_plan",
    "roster_of",
    "write_plan",
]

SCHEMA: Final = 1
WORTH: Final = 0.03
"""Of a step's time: what another number of micro-batches must gain to be told."""
LEAST_SAMPLES: Final = 2
"""Of a micro-batch that is advised: with one sample, BatchNorm has nothing to normalize."""
HOUR_S: Final = 3600.0


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one strategy on so many workers."""

    strategy: str
    workers: int
    hosts: int
    step_s: float
    parts: dict[str, float]
    """Seconds of the step, by what they are spent on."""
    samples_per_s: float
    efficiency: float
    """Of the workers: the rate, by that of one worker times their number."""
    memory_bytes: int
    """Of a worker; 0: unknown."""
    cost: float
    """Of 1000 steps, in the unit of the price; 0: no price was given."""
    bottleneck: str
    """What takes the most time."""
    loss: str
    """What takes the most time besides computation."""
    was_measured: bool


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned, and when."""

    schema: int = SCHEMA
    time: float
    """In seconds since 1970."""
    script: str
    link: str
    per_host: int
    batch_size: int
    microbatches: int
    spread: float
    """Of a repetition: the largest of the samples, as a part of the step."""
    forecasts: list[Forecast]
    groups: list[GroupForecast] = []
    """Of a model in stages."""


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast, and what came."""

    workers: int
    expected_s: float
    step_s: float
    spread: float

    @property
    def error(self) -> float:
        return self.expected_s / self.step_s - 1.0


def roster_of(workers: int, per_host: int, link: NetworkLink | None) -> Roster:
    """Return so many workers, as many on each host as fit; where there is no link, all on one."""
    return Roster(workers=workers, per_host=per_host if link is not None else max(per_host, workers), link=link)


def forecasts(
    facts: ForecastInputs,
    memories: Mapping[int, WorkerMemory],
    rosters: Sequence[Roster],
    options: StrategyOptions,
    price: float = 0.0,
) -> list[Forecast]:
    """Return what is expected of each strategy on each of some rosters.

    Args:
        memories: of a worker, by the number of workers of a machine on which it was measured.
        price: of a worker, for an hour.
    """
    alone = forecast(facts, Roster(workers=1, per_host=1)).step
    measured = {one.workers for one in facts.samples if one.hosts == 1}
    made = []
    for roster in rosters:
        for strategy in STRATEGIES.values():
            if strategy.refuses(facts, roster):
                continue
            parts = strategy.parts(facts, roster, options)
            held = STRATEGIES["shard"] if facts.is_sharded else strategy
            leaves = math.ceil(facts.microbatches / roster.workers)
            nearest = min(memories, key=lambda number: abs(number - roster.neighbours), default=0)
            made.append(
                Forecast(
                    strategy=strategy.name,
                    workers=roster.workers,
                    hosts=roster.hosts,
                    step_s=parts.step,
                    parts=_seconds(parts),
                    samples_per_s=facts.batch_size / parts.step,
                    efficiency=alone / parts.step / roster.workers,
                    memory_bytes=round(held.memory(memories[nearest], roster, options, leaves)) if memories else 0,
                    cost=price * roster.workers * parts.step * 1000 / HOUR_S,
                    bottleneck=parts.bottleneck,
                    loss=parts.loss,
                    was_measured=strategy.is_measured and roster.hosts == 1 and roster.workers in measured,
                )
            )
    return made


def best_microbatches(facts: ForecastInputs, roster: Roster) -> tuple[int, float]:
    """Return the number of micro-batches with the shortest step, and the part of the step's time that it saves.

    The smallest number that brings nine tenths of the most is taken; the present one where nothing is worth it. Fewer
    micro-batches are larger ones, which have to be tried (`unisono.tools.plan.finder`).
    """
    now = forecast(facts, roster).step
    most_cuts = facts.batch_size // LEAST_SAMPLES
    more = [number for number in candidates(facts, roster.workers) if facts.microbatches < number <= most_cuts]
    gains = {number: 1 - forecast(facts, roster, number).step / now for number in more}
    most = max(gains.values(), default=0.0)
    if most < WORTH:
        return facts.microbatches, 0.0
    number = min(number for number, gain in gains.items() if gain >= 0.9 * most)
    return number, gains[number]


def came(plan: PlanRecord, samples: Sequence[Sample]) -> list[Came]:
    """Return each forecast of the plan of which a run has measured as many workers on as many hosts."""
    expected = {(one.workers, one.hosts): one.step_s for one in plan.forecasts if STRATEGIES[one.strategy].is_measured}
    return [
        Came(
            workers=one.workers,
            expected_s=expected[one.workers, one.hosts],
            step_s=one.step,
            spread=math.hypot(one.spread, plan.spread),
        )
        for one in samples
        if (one.workers, one.hosts) in expected
    ]


def differs(plan: PlanRecord, recipe: Mapping[str, object]) -> str:
    """Return in what a run with this recipe differs from what was planned, in words; "": in nothing."""
    planned = {"batch_size": plan.batch_size, "microbatches": plan.microbatches}
    other = {name: recipe.get(name) for name in planned if recipe.get(name) != planned[name]}
    told = [f"{name}={planned[name]} in the plan and {value} in the run" for name, value in other.items()]
    return listed(told) if told else ""


def write_plan(path: Path, plan: PlanRecord) -> None:
    """Write the plan.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    except OSError as error:
        raise UsageError(f"the plan cannot be written to {path}: {error.strerror or error}") from error


def read_plan(directory: Path) -> PlanRecord | None:
    """Return the plan that a run's directory holds; None: there is none.

    Raises:
        UsageError: it cannot be read.
    """
    path = directory / PLAN_FILE
    advice = f"remove it, or write another one with `unisono plan SCRIPT --run-dir {directory}`"
    try:
        plan = msgspec.json.decode(read_regular(path), type=PlanRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {path} cannot be read ({error}); {advice}") from None
    if plan.schema != SCHEMA:
        raise UsageError(f"the plan {path} was written by a different version of unisono; {advice}")
    return plan


def _seconds(parts: Parts) -> dict[str, float]:
    names = ("compute", "waiting", "exchange", "network", "update", "other")
    return {name: getattr(parts, name) for name in names}
