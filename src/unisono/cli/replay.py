"""``unisono replay``: compute a run again up to one of its steps, on one worker, and look into it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from click import argument, option

from unisono.cli.again import PastRun, past_run
from unisono.cli.leave_out import leave_out
from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.replay_rules import Replay, with_words
from unisono.script.inspected import run_inspected

__all__ = ["replay"]

NUMBER = click.IntRange(min=0)


@click.command()
@argument("run", type=click.Path(path_type=Path))
@argument("script", nargs=-1, type=click.UNPROCESSED)
@option("--step", type=NUMBER, metavar="S", help="The last step to compute; for local steps, the round.")
@option("--micro-batch", "microbatch", type=NUMBER, metavar="M", help="Show this micro-batch of the step.")
@option("--pass", "turn", type=NUMBER, default=0, metavar="N", help="Which pass over the batch, with step.again.")
@option("--replica", type=NUMBER, metavar="R", help="For local steps: which replica.")
@option("--inner-step", type=NUMBER, metavar="I", help="For local steps: which step of the replica in its round.")
@option("--from-beginning", is_flag=True, help="Begin with step 0 instead of a checkpoint.")
@option("--with", "words", multiple=True, metavar="WHAT", help=(
    "anomaly: name the operation that produces a NaN.  debugger: stop in the script before the micro-batch.  "
    "save=DIR: write the micro-batch, the models before it and its gradients."
))  # fmt: skip
@option("--without", type=click.Path(), metavar="FILE", help="Compute the run as it would have been without the "
        "samples that FILE names: one index a line, or a range such as 100-199.")  # fmt: skip
@option("--into", type=click.Path(), metavar="DIR", help="With --without: the directory of the new run.")
@option("--workers", metavar="N|A:B", help="With --without: how many workers compute it.  [default: 1]")
def replay(
    run: Path,
    script: tuple[str, ...],
    step: int | None,
    microbatch: int | None,
    turn: int,
    replica: int | None,
    inner_step: int | None,
    from_beginning: bool,
    words: tuple[str, ...],
    without: str | None,
    into: str | None,
    workers: str | None,
) -> int:
    """Recompute RUN (a directory) from its newest checkpoint before a step, on one worker, and compare each step with
    the journal. Nothing is written into RUN.

    \b
        unisono replay runs/digits --step 350
        unisono replay runs/digits --step 350 --micro-batch 3
        unisono replay runs/digits --step 350 --micro-batch 3 --with debugger
        unisono replay runs/digits --step 350 --micro-batch 3 --with save=found
        unisono replay runs/digits --without deleted.txt --into runs/digits2

    The script is the run's own, in the same folder, unless you give one after the options. It gets the run's arguments
    unless you give others. The digest of a micro-batch is compared with the audited one (unisono run --audit), where
    the journal has one.

    With --without, the result is a run of its own in DIR: it starts from the newest checkpoint before the first of the
    samples was used, keeps the order of all other samples, and is computed to the end.

    Exit code: 0 all steps match the journal, 1 one does not, or the script failed, 2 the run cannot be replayed, 3 the
    debugger was left before the step was over.
    """
    if without is not None:
        if into is None or (step, microbatch, turn, replica, inner_step, words) != (None, None, 0, None, None, ()):
            raise UsageError(
                "--without computes all steps that follow, into a directory of their own: give --into DIR, and neither "
                "--step nor an option that inspects a step"
            )
        return leave_out(PastRun(run, script), without, into, workers=workers or "1", from_beginning=from_beginning)
    if into or workers:
        raise UsageError("--into and --workers are for --without: any other replay uses one worker, and writes no run")
    if step is None:
        raise UsageError("which step? --step S, by its number in the journal")
    given = with_words(words)
    if given.get("debugger") and not sys.stdin.isatty():
        raise UsageError("--with debugger needs a terminal, and standard input is not one")
    if given.get("save"):
        given["save"] = _checked_folder(given["save"])
    wanted: dict[str, Any] = {"leaf": microbatch, "replica": replica, "inner": inner_step}
    asked = {name: value for name, value in wanted.items() if value is not None}
    with past_run(run, script) as (found, directory):
        if not script:
            found.check_step(step)
        start = None if from_beginning else found.start(step)
        if start is None and not from_beginning:
            say("unisono: starting from the beginning of the run: there is no checkpoint before", err=True)
        wish = Replay(
            run=str(found.run),
            step=step,
            turn=turn,
            looks=bool(asked or given),
            fingerprint=found.fingerprint,
            **asked,
            **given,
        )
        spec = found.spec(start, directory, "replay", msgspec.json.encode(wish).decode())
        return run_inspected(spec, variables=found.variables)


def _checked_folder(name: str) -> str:
    """Make the folder for ``--with save=DIR``; returns its path.

    Raises:
        UsageError: it cannot be written.
    """
    folder = os.path.abspath(name)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--with save={name} cannot be written: {error.strerror}") from None
    return folder
