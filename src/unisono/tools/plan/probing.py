"""Trials: the first steps of a script, in processes of their own and in a directory that is removed afterwards."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from unisono.core.errors import UsageError
from unisono.core.words import count, exit_words, without_evidence
from unisono.record.history import History
from unisono.tools.plan.forecast import ForecastInputs, Sample
from unisono.tools.plan.found import IN_A_ROW, ProbeSettings, WorkerFindings, found_in
from unisono.tools.plan.measuring import check_recipe, facts_from, samples_in
from unisono.tools.plan.strategy_models import WorkerMemory
from unisono.tools.trialrun import Script, trial_run

__all__ = [
    "Measurement",
    "OutOfMemory",
    "Script",
    "TrialFailed",
    "facts_of",
    "memories_of",
    "trial",
]

LIMIT_S: Final = 600.0
NUM_LINES: Final = 12


class TrialFailed(UsageError):
    """A trial has not come to its end."""


class OutOfMemory(TrialFailed):
    """There was not enough memory for it."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one trial has found."""

    sample: Sample
    found: WorkerFindings


def trial(
    script: Script, settings: ProbeSettings, *, workers: int = 1, hosts: int = 1, least: int = IN_A_ROW
) -> Measurement:
    """Let workers do the first steps of a script, and return what was measured. Blocks until they have ended.

    Args:
        hosts: more than 1: the workers are as if on several machines.
        least: steps that are enough where no training of the script has as many as the settings ask for.

    Raises:
        TrialFailed: the script has failed, or has ended before enough steps were done.
    """
    place = Path(tempfile.mkdtemp(prefix=f"{workers}-{hosts}-", dir=script.directory))
    asked = msgspec.json.encode(msgspec.structs.replace(settings, workers=workers)).decode()
    try:
        code, output = trial_run(
            script,
            place / "run",
            ("probe", asked),
            workers=workers,
            hosts=hosts,
            limit_s=LIMIT_S,
            name=f"with {count(workers, 'worker')}",
            steps=settings.steps,
        )
    except TimeoutError as error:
        advice = "give fewer --steps" if settings.steps > least else f"a plan needs {least} steps"
        raise TrialFailed(f"{error}; {advice}") from None
    found = found_in(place / "run")
    enough = settings.steps if code else min(settings.steps, least)
    if found is None or found.done < enough:
        kind = OutOfMemory if _was_short_of_memory(place / "run") else TrialFailed
        raise kind(_words(code, enough, output, found.done if found is not None else 0))
    samples = [one for one in samples_in(place / "run", found.first) if one.workers == workers]
    if not samples:
        raise TrialFailed(
            f"of {found.done} steps with {count(workers, 'worker')} too few could be measured ({least} in a row, with "
            "the same workers, are needed); increase --steps"
        )
    return Measurement(sample=samples[0], found=found)


def facts_of(trials: Sequence[Measurement], room: int) -> ForecastInputs:
    """Return what a forecast is made from.

    Raises:
        UsageError: the script trains in another way than a plain ``run.steps``.
    """
    found = trials[0].found
    check_recipe(found.recipe)
    return facts_from([one.sample for one in trials], found.recipe, msgspec.structs.asdict(found), room)


def memories_of(trials: Sequence[Measurement]) -> dict[int, WorkerMemory]:
    """Return the memory of a worker by the number of workers of its machine; of what they share, each has a part."""
    return {
        one.sample.workers: WorkerMemory(
            parts=one.found.parts,
            activations=max(0, one.found.peak - sum(one.found.parts.values())),
            gradient_bytes=one.found.gradient_bytes,
            leaves=math.ceil(int(one.found.recipe["microbatches"]) / one.sample.workers),
        )
        for one in trials
        if one.sample.hosts == 1
    }


def _was_short_of_memory(directory: Path) -> bool:
    told = History(directory).every_event()
    return any(one.get("kind") == "problem" and one.get("problem") == "out-of-memory" for one in told)


def _words(code: int, enough: int, output: str, done: int) -> str:
    lines = without_evidence(output.strip().splitlines())[-NUM_LINES:]
    told = "".join(f"\n  {line}" for line in lines)
    if code == 0:
        what = f"the script has ended before {enough} steps of one training were done: "
        if not done:
            return f"{what}it did none (a script that does not use Unisono does none){told}"
        return f"{what}it did {done}, and a plan needs {enough}; let it do more (epochs, max_steps){told}"
    return f"the trial {exit_words(code)}:{told}"
