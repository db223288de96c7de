"""A plan as text for people."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from unisono.core.words import count, short_duration, shown_bytes
from unisono.tools.plan.forecast import ForecastInputs, Roster
from unisono.tools.plan.layouts import GroupForecast
from unisono.tools.plan.plans import WORTH, Came, Forecast, PlanRecord, best_microbatches
from unisono.tools.plan.strategy_models import STRATEGIES, StrategyOptions

__all__ = [
    "shown_came",
    "shown_conclusions",
    "shown_cost",
    "shown_groups",
    "shown_missing",
    "shown_strategies",
    "shown_table",
    "shown_time",
    "shown_workers",
]

AS_IT_IS = "(as it is)"
HALF = 0.5
"""A worker that adds less than this part of what the first one does is not worth its price."""


def shown_workers(plan: PlanRecord, price: float) -> str:
    """Return the table of the strategy that was measured, a line for each number of workers."""
    rows = [
        [
            f"{one.workers}{'*' if one.was_measured else ''}",
            str(one.hosts),
            shown_time(one.step_s),
            f"{one.samples_per_s:,.0f}",
            f"{one.efficiency:.0%}",
            shown_bytes(one.memory_bytes) if one.memory_bytes else "-",
            shown_cost(one.cost) if price else "-",
            one.bottleneck,
        ]
        for one in plan.forecasts
        if STRATEGIES[one.strategy].is_measured
    ]
    header = ["workers", "hosts", "step", "samples/s", "efficiency", "memory each", "cost of 1000 steps", "most time"]
    return shown_table([header, *rows], drop=() if price else (6,))


def shown_strategies(plan: PlanRecord, workers: int, options: StrategyOptions) -> str:
    """Return the strategies for one number of workers, the shortest step first."""
    found = sorted((one for one in plan.forecasts if one.workers == workers), key=lambda one: one.step_s)
    rows = [
        [
            AS_IT_IS if STRATEGIES[one.strategy].is_measured else one.strategy,
            shown_time(one.step_s),
            shown_bytes(one.memory_bytes) if one.memory_bytes else "-",
            one.bottleneck,
            STRATEGIES[one.strategy].learns,
            STRATEGIES[one.strategy].how.format(
                workers=workers, copies=options.copies, inner_steps=options.inner_steps
            ),
        ]
        for one in found
    ]
    header = ["strategy", "step", "memory each", "most time", "what is learned", "how"]
    return shown_table([header, *rows])


def shown_missing(facts: ForecastInputs, roster: Roster) -> str:
    """Return why strategies have no row for these workers; "": all have one."""
    why = {one.name: one.refuses(facts, roster) for one in STRATEGIES.values()}
    told = "; ".join(f"{name} ({reason})" for name, reason in why.items() if reason)
    return f"Without a row: {told}." if told else ""


def shown_groups(made: Sequence[GroupForecast], num_stages: int) -> str:
    """Return the layouts as text for people."""
    rows = [
        [
            f"{one.groups}x{one.parts}",
            shown_time(one.least_step_s),
            ", ".join(map(shown_bytes, one.memory_bytes)),
        ]
        for one in made
    ]
    table = shown_table([["workers", "step, at least", "memory of each process of a group"], *rows])
    return (
        f"in groups, which share out the {count(num_stages, 'stage')} of the model (computed from one process: "
        f"docs/memory.md):\n\n{table}\n"
    )


def shown_conclusions(facts: ForecastInputs, plan: PlanRecord, roster: Roster, room_bytes: int | None) -> list[str]:
    """Return what follows from a plan, in sentences.

    Args:
        roster: of the most workers.
        room_bytes: memory that workers of one machine can have together; None: unknown.
    """
    own = [one for one in plan.forecasts if STRATEGIES[one.strategy].is_measured]
    said = []
    if (end := _end(own)) is not None:
        before, after = end
        said.append(
            f"From {count(before.workers, 'worker')} to {after.workers}, each further worker adds less than half of "
            f"what the first one does: most of what is lost is {after.loss}."
        )
    number, gain = best_microbatches(facts, roster)
    if gain >= WORTH:
        said.append(
            f"With {count(roster.workers, 'worker')}, a step with microbatches={number} (now {facts.microbatches}), of "
            f"{count(facts.batch_size // number, 'sample')} each, would take {gain:.0%} less time. It is part of the "
            "recipe: the results would have different bits."
        )
    if room_bytes is not None and own and own[-1].memory_bytes:
        fit = room_bytes // max(1, own[-1].memory_bytes)
        here = roster.neighbours
        said.append(
            f"Memory: {shown_bytes(own[-1].memory_bytes)} each, and this machine has {shown_bytes(room_bytes)} left: "
            + (
                f"{count(here, 'worker')} {'fits' if here == 1 else 'fit'} on it."
                if fit >= here
                else f"only {fit} of {here} fit on it."
            )
        )
    return said


def shown_came(found: Sequence[Came]) -> str:
    """Return what was expected beside what came."""
    rows = [
        [str(one.workers), shown_time(one.expected_s), shown_time(one.step_s), f"{one.error:+.1%}", f"{one.spread:.1%}"]
        for one in found
    ]
    return shown_table([["workers", "expected", "came", "error", "spread of a repetition"], *rows])


def _end(own: Sequence[Forecast]) -> tuple[Forecast, Forecast] | None:
    """Return between which numbers of workers a further one ceases to be worth it."""
    if len(own) < 2:
        return None
    unit = own[0].samples_per_s / own[0].workers
    for before, after in itertools.pairwise(own):
        if after.samples_per_s - before.samples_per_s < HALF * unit * (after.workers - before.workers):
            return before, after
    return None


def shown_time(seconds: float) -> str:
    """Return ``35.2 ms`` or ``1.2 s``."""
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else short_duration(seconds)


def shown_cost(cost: float) -> str:
    """Return ``12.35``, ``0.072`` or ``0.00031``: two digits after the point, or as many as show two that are not 0."""
    digits = 2 if cost <= 0 else max(2, 1 - math.floor(math.log10(cost)))
    return f"{cost:,.{digits}f}"


def shown_table(rows: Sequence[Sequence[str]], drop: Sequence[int] = ()) -> str:
    """Return rows of cells as a table; the first row is its header.

    Args:
        drop: places of columns that are left out.
    """
    kept = [[cell for place, cell in enumerate(row) if place not in drop] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*kept, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in kept
    )
