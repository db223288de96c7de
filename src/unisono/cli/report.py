"""``unisono report``: one HTML file about a run, or about several side by side."""

from __future__ import annotations

import time
from pathlib import Path

import click

from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.record import rundir
from unisono.system.owned import write_whole
from unisono.views.report import account
from unisono.views.report import report as made_of

__all__ = ["report"]

DEFAULT = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write. Default: report.html in the "
              "directory of the run; of several runs, in the current directory.")  # fmt: skip
def report(runs: tuple[Path, ...], output: Path | None) -> int:
    """Write a report of one run, or of several RUNS side by side, as one HTML file that needs nothing else.

    It shows the result, the curves, where the workers' time went, every interruption and its cost, and what would make
    the run faster. It can be written while the run goes on.
    """
    for run in runs:
        if not run.is_dir() or rundir.holder(run) is None:
            raise UsageError(f"there is no run in {run}: no {rundir.RUN_FILE}, and no journal")
    try:
        accounts = [account(run) for run in runs]
    except OSError as error:
        raise UsageError(f"a run cannot be read: {error}") from error
    target = output or (runs[0] / DEFAULT if len(runs) == 1 else Path(DEFAULT))
    _write(target, made_of(accounts, time.time()))
    for each in accounts:
        say(f"{each.name}: {each.sentence}")
        for advice in each.advice[:3]:
            say(f"  {advice.text}")
        for note in each.notes:
            say(f"  not shown: {note}")
    say(f"the report of {count(len(accounts), 'run')} is {target}")
    return 0


def _write(target: Path, text: str) -> None:
    """Write the file at once, or leave what is there."""
    try:
        write_whole(target, text.encode())
    except OSError as error:
        raise UsageError(f"the report cannot be written to {target}: {error.strerror or error}") from error
