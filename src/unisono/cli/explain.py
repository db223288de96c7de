"""Explanation of the first difference of two runs, by computing the step again in both of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec

from unisono.cli.again import PastRun, past_run
from unisono.cli.resume import command_of
from unisono.cli.saying import say
from unisono.core.errors import UnisonoError
from unisono.core.fingerprints import other_arithmetic
from unisono.core.replay_rules import ReplayStart
from unisono.core.words import exit_words
from unisono.record.explaining import Dissected, Dissection, causes, parting
from unisono.record.journal import Difference
from unisono.record.rundir import read_facts
from unisono.script.inspected import INTERRUPTED, run_inspected
from unisono.system.fingerprint import script_checksum
from unisono.system.owned import read_regular

__all__ = ["explained"]


def explained(run_a: Path, run_b: Path, difference: Difference) -> str:
    """Return where two runs part, and probably why: one sentence a line.

    Args:
        run_a, run_b: directories of runs, or journals in them.
    """
    folders = [path if path.is_dir() else path.parent for path in (run_a, run_b)]
    facts: list[dict[str, Any]] = [read_facts(folder) for folder in folders]
    place: list[str] = []
    found = [Dissected(run=str(path), step=difference.step) for path in (run_a, run_b)]
    if difference.step >= 0:
        found = [_dissected(folder, one) for folder, one in zip(folders, found, strict=True)]
        place = parting(found[0], found[1], difference.digests)
    why = causes(found[0], found[1], facts[0], facts[1], (_text(facts[0]), _text(facts[1])))
    return "\n".join([*(f"where: {one}" for one in place), *(f"why: {one}" for one in why)])


def _dissected(run: Path, empty: Dissected) -> Dissected:
    """Compute a step of a run again; returns everything about it, or why it could not be computed.

    A run that is not what it was from a checkpoint on is computed from the beginning as well.
    """
    say(f"unisono: computes step {empty.step} of {empty.run} again", err=True)
    try:
        found = PastRun(run)
        start = found.start(empty.step)
        known = _computed(run, empty, start)
        if start is None or not known.drift or other_arithmetic(found.fingerprint, known.fingerprint):
            return known
        say(f"unisono: {empty.run} is not what it was: computes it from the beginning as well", err=True)
        whole = _computed(run, empty, None)
        return known if whole.drift or whole.failure else msgspec.structs.replace(whole, untracked=start.step)
    except UnisonoError as error:
        return msgspec.structs.replace(empty, failure=str(error))


def _computed(run: Path, empty: Dissected, start: ReplayStart | None) -> Dissected:
    """Compute a step of a run again from a checkpoint; None: from the beginning."""
    with past_run(run) as (found, directory):
        result = Path(directory) / "dissected.json"
        asked = Dissection(run=str(found.run), name=empty.run, step=empty.step, result=str(result))
        spec = found.spec(start, directory, "dissect", msgspec.json.encode(asked).decode())
        code = run_inspected(spec, variables=found.variables, stdout=subprocess.DEVNULL)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        known = msgspec.json.decode(result.read_bytes(), type=Dissected) if result.exists() else empty
    if not known.digest and not known.failure:
        return msgspec.structs.replace(known, failure=f"its script {exit_words(code)} before the step was done")
    return known


def _text(facts: dict[str, Any]) -> str:
    """Return the text of a run's script, if it is still there as the run has used it; "" if it is not."""
    command, environment = command_of(facts), facts.get("environment")
    if command is None or not isinstance(environment, dict) or command[1][0].startswith("-"):
        return ""
    path = Path(command[0], command[1][0])
    try:
        text = read_regular(path.resolve()).decode()
    except (OSError, ValueError):
        return ""
    return text if script_checksum([str(path)]) == environment.get("script") else ""
