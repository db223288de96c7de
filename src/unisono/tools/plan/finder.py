"""The finder: tries sizes of a micro-batch, and says which fit and which are fastest. It changes nothing by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unisono.core.words import count, shown_bytes
from unisono.system.process import tell
from unisono.tools.plan.fitting import SPARE, Tried, expected_peak, fastest, largest, next_size, sizes_for
from unisono.tools.plan.forecast import ForecastInputs, Roster, forecast
from unisono.tools.plan.found import IN_A_ROW_ALONE, PROGRAM, ProbeSettings, WorkerFindings
from unisono.tools.plan.plans import WORTH
from unisono.tools.plan.probing import OutOfMemory, Script, TrialFailed, trial
from unisono.tools.plan.told import shown_table, shown_time

__all__ = ["WHAT", "Search", "plain_search", "search", "shown_search"]

WHAT: Final = ("microbatches", "batch")
DOUBLINGS: Final = 20
CERTAIN: Final = 0.95
"""Of the memory that a worker could have: what a trial may take at most."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was found."""

    tried: Sequence[Tried]
    fixed: int
    """Bytes that do not depend on the size of a micro-batch."""
    limit: int | None
    """Bytes that a worker could have; None: unknown."""
    batch_size: int
    microbatches: int
    num_samples: int = 0
    """Of the data set; 0: unknown."""
    stopped: str = ""
    """Why no larger size was tried, where that was not the memory."""


def search(script: Script, found: WorkerFindings, steps: int, what: Sequence[str]) -> Search:
    """Try sizes of a micro-batch, each alone, in a process of its own. Blocks until enough is known.

    Args:
        found: by the trial of the script as it is.
        what: of `WHAT`.
    """
    batch_size, number = int(found.recipe["batch_size"]), int(found.recipe["microbatches"])
    samples = int(found.recipe.get("num_samples", batch_size))
    own = batch_size // number
    wants_batch = "batch" in what
    if wants_batch:
        doubled = [own << doubling for doubling in range(DOUBLINGS)]
        halved = [own >> doubling for doubling in range(1, own.bit_length())]
        sizes = sorted(one for one in {*doubled, *halved} if one <= max(own, samples // number))
    else:
        sizes = sizes_for(batch_size, own, batch_size)
    fixed = sum(found.parts.values()) - found.gradient_bytes * (number.bit_length() - 1)
    is_gpu = not found.device.startswith("cpu")
    made = Search(
        tried=(),
        fixed=fixed,
        limit=found.limit,
        batch_size=batch_size,
        microbatches=number,
        num_samples=samples if wants_batch else 0,
    )
    # No process of the machine is to be killed for a trial; an accelerator refuses what it does not have by itself.
    limit = None if is_gpu else found.limit
    room = None if limit is None else max(0, int(CERTAIN * limit) - found.parts[PROGRAM])
    following: int | None = own
    while following is not None:
        size = following
        tell(f"unisono: tries micro-batches of {count(size, 'sample')}")
        settings = ProbeSettings(steps=steps, seconds=1.0, microbatches=1, batch_size=size, room=room)
        try:
            done = trial(script, settings, least=IN_A_ROW_ALONE)  # larger batches: fewer steps
            tried = Tried(size=size, seconds=done.sample.pace, peak=done.found.peak)
        except OutOfMemory:
            tried = Tried(size=size, seconds=math.inf, peak=0)
        except TrialFailed as error:
            return dataclasses.replace(made, stopped=f"with {count(size, 'sample')} {_reason(str(error))}")
        made = dataclasses.replace(made, tried=(*made.tried, tried))
        following = next_size(made.tried, sizes, fixed=fixed, limit=limit, to_the_limit=wants_batch)
    return made


def _reason(told: str) -> str:
    """Return one line of why a trial has failed: the last one of the output that follows a colon, as of a traceback."""
    lines = told.strip().splitlines()
    return f"the trial failed: {lines[-1].strip() if lines[0].endswith(':') else lines[0]}"


def with_search(facts: ForecastInputs, made: Search) -> ForecastInputs:
    """Return the facts with the paces that were found for other numbers of micro-batches of the same batch."""
    paces = {
        facts.batch_size // one.size: one.seconds for one in made.tried if one.fits and facts.batch_size % one.size == 0
    }
    return dataclasses.replace(facts, paces=paces) if facts.microbatches in paces else facts


def shown_search(made: Search, facts: ForecastInputs, roster: Roster, what: Sequence[str]) -> str:
    """Return what was found, and what would have to be written, for people.

    Args:
        roster: the workers that the number of micro-batches is chosen for.
    """
    if not made.tried:
        return f"Nothing was found: {made.stopped}"
    rows = [
        [
            str(one.size),
            shown_time(one.seconds) if one.fits else "does not fit",
            f"{one.rate:,.0f}" if one.fits else "-",
            shown_bytes(one.peak) if one.fits else "-",
        ]
        for one in sorted(made.tried, key=lambda one: one.size)
    ]
    lines = ["one worker, by trying:", "", shown_table([["micro-batch", "time", "samples/s", "memory"], *rows]), ""]
    lines += _limits(made)
    if "microbatches" in what:
        lines += _microbatches(made, with_search(facts, made), roster)
    if "batch" in what:
        lines += _batch(made)
    lines.append("Nothing was changed.")
    return "\n".join(lines)


def plain_search(made: Search) -> dict[str, object]:
    """Return what was found, for programs."""
    best, fast = largest(made.tried), fastest(made.tried)
    return {
        "tried": [
            {
                "samples": one.size,
                "fits": one.fits,
                "seconds": one.seconds if one.fits else None,
                "memory_bytes": one.peak if one.fits else None,
            }
            for one in made.tried
        ],
        "largest": best.size if best is not None else None,
        "fastest": fast.size if fast is not None else None,
        "stopped": made.stopped,
    }


def _limits(made: Search) -> list[str]:
    best, fast = largest(made.tried), fastest(made.tried)
    if best is None or fast is None:
        return ["None of the tried sizes fits; use a smaller model, or more memory."]
    said = [f"The largest micro-batch that was tried and fits has {count(best.size, 'sample')}."]
    if made.stopped:
        said.append(f"No larger one was tried: {made.stopped}")
    elif made.num_samples and 2 * best.size * made.microbatches > max(made.num_samples, made.batch_size):
        said.append(
            f"Larger ones were not tried: {made.microbatches} of them are more than the "
            f"{count(made.num_samples, 'sample')} of the dataset."
        )
    elif made.limit is not None and (need := expected_peak(made.tried, made.fixed, 2 * best.size)) > SPARE * made.limit:
        said.append(
            f"One of {2 * best.size} would need about {shown_bytes(int(need))}, and a worker could have "
            f"{shown_bytes(made.limit)}, of which {SPARE:.0%} are used at most."
        )
    said.append(f"One worker is fastest with {count(fast.size, 'sample')}: {fast.rate:,.0f} samples a second.")
    return said


def _microbatches(made: Search, facts: ForecastInputs, roster: Roster) -> list[str]:
    now = forecast(facts, roster).step
    steps = {number: forecast(facts, roster, number).step for number in facts.paces}
    workers = count(roster.workers, "worker")
    number, step = min(steps.items(), key=lambda one: one[1], default=(made.microbatches, now))
    if step > (1 - WORTH) * now:
        return [f"With {workers}, microbatches={made.microbatches} is as fast as any other number that was tried."]
    return [
        f"With {workers}, microbatches={number} (now {made.microbatches}) would take {1 - step / now:.0%} less time "
        "for the same batches. The number is part of the recipe: it changes the result's bits and BatchNorm's "
        "statistics. To use it, write:",
        f"    run.steps(..., batch_size={made.batch_size}, microbatches={number})",
    ]


def _batch(made: Search) -> list[str]:
    best = largest(made.tried)
    if best is None or best.size * made.microbatches <= made.batch_size:
        return [f"No batch larger than {made.batch_size} was found to fit in {made.microbatches} micro-batches."]
    size = best.size * made.microbatches
    return [
        f"The largest batch that fits in {made.microbatches} micro-batches has {size} samples (now "
        f"{made.batch_size}). A different batch size is a different training: fewer updates per epoch, and the "
        "learning rate must be adapted. Only you can decide whether you want that; larger batches also fit as more "
        "micro-batches. To use it, write:",
        f"    run.steps(..., batch_size={size}, microbatches={made.microbatches})",
    ]
