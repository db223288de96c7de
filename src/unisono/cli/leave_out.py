"""``unisono replay --without``: a run as it would have been without some samples, from the step on that needs them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unisono.cli.again import PastRun
from unisono.cli.options import options_of
from unisono.cli.resume import threads_of
from unisono.cli.run import start
from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.events import StepFinished
from unisono.core.without import first_use, order_named, shards_in
from unisono.core.words import count
from unisono.record.journal import events
from unisono.record.rundir import holder
from unisono.record.without import read_without
from unisono.system.fingerprint import SWITCHES

__all__ = ["leave_out"]


def leave_out(found: PastRun, file: str, into: str, *, workers: str, from_beginning: bool) -> int:
    """Compute a run without the samples that a file names, as a run of its own. Goes to the folder of the script.

    Args:
        found: the run that has used them.
        into: the directory of the new run.

    Returns:
        The exit code of the new run; 1 also if it is another one before a sample is left out.

    Raises:
        UsageError: the run, the file or the directory does not allow it. Nothing was started.
    """
    new, file = Path(into).resolve(), os.path.abspath(file)
    if new.is_relative_to(found.run):
        raise UsageError(f"--into {into} is inside {found.run}, whose files must not change: name another directory")
    if (other := holder(new)) is not None:
        raise UsageError(f"--into {into} holds a run ({other}): name another directory")
    before = _steps(found.run)
    first, number = _first(found, file, before)
    begin = None if from_beginning else found.start(first)
    what = f"leaving out {count(number, 'sample')}, first used in step {first}"
    where = f"at step {begin.step}, from {begin.path}" if begin is not None else "at the beginning"
    say(f"unisono: {what}; starting {where}; the new run is written into {new}", err=True)
    at = begin.step if begin is not None else 0
    left = {"run_id": str(found.facts.get("run_id")), "step": first, "checkpoint_step": at}
    recipe = found.facts["recipe"]
    os.chdir(found.folder)
    for name in SWITCHES:
        os.environ.pop(name, None)
    os.environ.update(found.variables)
    script, *arguments = found.arguments
    is_module = script == "-m"
    code = start(
        options_of(
            {
                "script": None if is_module else script,
                "module": arguments[0] if is_module else None,
                "arguments": tuple(arguments[1:] if is_module else arguments),
                "workers": workers,
                "threads": str(threads_of(found.facts)),
                "run_dir": str(new),
                "resume": begin.path if begin is not None else None,
                "others": (
                    f"without={file}",
                    f"left={json.dumps(left)}",
                    *([f"arithmetic={recipe['arithmetic']}"] if "arithmetic" in recipe else ()),
                ),
            }
        )
    )
    return code or _report(found.run, new, before, first)


def _steps(run: Path) -> list[StepFinished]:
    """Return the steps of a run, from the first on.

    Raises:
        UsageError: the journal lacks one, or cannot be read.
    """
    try:
        found = [event for event in events(run) if isinstance(event, StepFinished)]
    except (OSError, ValueError) as error:
        raise UsageError(f"the journal of {run} cannot be read: {error}") from None
    if any(event.step != number for number, event in enumerate(found)):
        raise UsageError(
            f"the journal of {run} lacks some of its steps, so it is unknown which samples they used; begin a new run "
            "without them: unisono run SCRIPT --set without=FILE --run-dir DIR"
        )
    return found


def _first(found: PastRun, file: str, before: list[StepFinished]) -> tuple[int, int]:
    """Return the first step that has used a sample of a file, and the number of these samples.

    Raises:
        UsageError: the file is wrong, no step has, or nobody knows which step has.
    """
    recipe: dict[str, Any] = found.facts.get("recipe") or {}
    if "without" in recipe:
        raise UsageError(
            f"{found.run} was made without some samples already: begin with the run that had all of them, and a list "
            "of all that are left out"
        )
    match recipe:
        case {"order": str(name), "num_samples": int(num_samples), "batch_size": int(size), "seed": int(seed)}:
            order = order_named(name, num_samples)
        case _:
            name, order = "unknown", None
    if order is None or min(num_samples, order.num_indices, size) < 1:
        raise UsageError(
            f"the order of the samples of {found.run} is not known from its description ({name}): it is that of "
            "streams, whose samples have no index, or of a sampler that only the script has. With a sampler, begin a "
            "new run without them: unisono run SCRIPT --set without=FILE --run-dir DIR"
        )
    match found.facts.get("data"):
        case {"shards": said}:
            shards = shards_in(said, order.num_indices)
        case _:
            shards = {}
    without = read_without(file, order.num_indices, shards)
    length = num_samples // size * size if recipe.get("drop_last") else num_samples
    first = first_use([(one.epoch, one.samples) for one in before], order, seed, length, without.samples)
    if first is None:
        raise UsageError(
            f"none of the {count(len(without.samples), 'sample')} of {file} was used in the "
            f"{count(len(before), 'step')} of {found.run}: the run is as it would have been without them"
        )
    return first, len(without.samples)


def _report(run: Path, new: Path, before: list[StepFinished], first: int) -> int:
    """Say how the new run differs from the one before; returns 1 if it does before a sample was left out."""
    after = _steps(new)
    others = [old.step for old, now in zip(before, after, strict=False) if old.digest != now.digest]
    if others and others[0] < first:
        say(
            f"unisono: step {others[0]} differs from {run} already, which had used none of the samples by then: its "
            "script or its data have changed since, or its arithmetic was different",
            err=True,
        )
        return 1
    say(
        f"unisono: {count(first, 'step')} as in {run}; of the {count(len(after) - first, 'step')} from step {first} "
        f"on, {len(others)} have another digest. The last loss is {after[-1].loss:.6g}; it was {before[-1].loss:.6g}"
    )
    return 0
