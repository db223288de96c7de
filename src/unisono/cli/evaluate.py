"""``unisono evaluate``: be an evaluator of a run that is going, and compute what its script leaves to evaluators."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Final

import click
import msgspec
from click import argument

from unisono.cli.again import PastRun, past_run
from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.settings import split_parts
from unisono.core.words import exit_words
from unisono.engine.checkpoint.evaluations import REFUSED, Snapshots, claimed, give_up, order_of
from unisono.record.history import History
from unisono.record.rundir import holder, is_going
from unisono.script.inspected import INTERRUPTED, run_inspected
from unisono.system.fingerprint import script_checksum
from unisono.system.lifetime import bind_to_parent

__all__ = ["evaluate"]

LOOK_S: Final = 0.1
ENDED_S: Final = 5.0
"""A run of which no process has held its directory for so long is over; after a loss of all workers others begin."""


@click.command()
@argument("run", type=click.Path(path_type=Path))
@argument("script", nargs=-1, type=click.UNPROCESSED)
def evaluate(run: Path, script: tuple[str, ...]) -> int:
    """Compute the evaluations that the run in RUN (a directory) leaves to evaluators: run.evaluate(..., wait=False).
    Works on any machine that sees the directory, as long as the run is active.

    \b
        unisono evaluate runs/digits

    The script is the run's own, in the same folder; give its path after RUN if it has moved. It gets the run's
    arguments unless you give others after it. Each snapshot starts the script once.

    Exit code: 0 the run is over, 2 this machine cannot evaluate for it. Ctrl-C ends the command; another evaluator, or
    the workers, compute what it leaves undone.
    """
    bind_to_parent(signal.SIGKILL)
    with past_run(run, script) as (past, folder):
        if not is_going(past.run):
            raise UsageError(f"no run is active in {run}, so there is nothing to evaluate")
        _check_groups(past)
        os.chdir(past.folder)
        _check_script(past)
        return _follow(past, Path(folder))


def _check_groups(past: PastRun) -> None:
    """Raise UsageError if the run leaves no evaluations to others, because its groups compute them."""
    parts = History(past.run).overview().parts
    match past.facts.get("command"):  # as long as nobody has joined
        case {"settings": {"workers": [str(text), *_]}}:
            with contextlib.suppress(UsageError):  # words
                parts = max(parts, split_parts(text)[1])
    if parts > 1:
        raise UsageError(
            f"the run in {past.run} has groups of {parts} processes, each of which has a part of the model, so it "
            "computes its evaluations itself, also those with wait=False: an evaluator would have nothing to do"
        )


def _check_script(past: PastRun) -> None:
    """Raise UsageError if the script is not that of the run: its totals may be others, and nobody would see it."""
    match past.facts.get("environment"):
        case {"script": str(known)} if known != script_checksum(past.arguments):
            raise UsageError(
                f"the script {past.arguments[0]} is not the one that the run started with: its text has changed, so "
                "its totals may differ. Restore the original text"
            )


def _follow(past: PastRun, folder: Path) -> int:
    """Compute one snapshot after the other until the run is over; returns the exit code."""
    snapshots, run_id = Snapshots(past.run, 0.0), holder(past.run)
    with contextlib.ExitStack() as attended:
        try:
            attended.enter_context(snapshots.attended())
        except OSError as error:
            raise UsageError(f"{past.run} cannot be used by an evaluator: {error.strerror or error}") from error
        say(f"unisono: evaluating for the run in {past.run}", err=True)
        alive_at = time.monotonic()
        while holder(past.run) == run_id:
            if is_going(past.run):
                alive_at = time.monotonic()
            elif time.monotonic() - alive_at > ENDED_S:
                break
            for snapshot in snapshots.waiting():
                with claimed(snapshot) as is_mine:
                    if is_mine and (code := _compute(past, snapshot, folder / snapshot.name)) != 0:
                        return code
            time.sleep(LOOK_S)
        return 0


def _compute(past: PastRun, snapshot: Path, directory: Path) -> int:
    """Have the totals of a snapshot computed, by the script in a process of its own.

    Returns:
        0, or the exit code of this evaluator, which cannot go on.
    """
    try:
        order = order_of(snapshot)
    except (OSError, msgspec.MsgspecError):  # the run does not wait for it any more
        return 0
    spec = past.spec(None, str(directory), "evaluate", msgspec.json.encode(str(snapshot)).decode())
    code = run_inspected(spec, variables=past.variables)
    shutil.rmtree(directory, ignore_errors=True)
    if code in (REFUSED, INTERRUPTED):
        return code
    if code != 0:
        give_up(snapshot, f"the script of an evaluator {exit_words(code)} before {order.place}; see its output")
    return 0
