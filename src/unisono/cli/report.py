"""``unisono report``: one HTML file about a run, or about several side by side; or a table of them."""

from __future__ import annotations

import time
from pathlib import Path

import click

from unisono.cli.saying import say, say_lines
from unisono.core.errors import UsageError
from unisono.record import rundir
from unisono.system.owned import write_whole
from unisono.views.report import account, runs_table
from unisono.views.report import report as made_of

__all__ = ["report"]


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write. Default: report.html in the "
              "directory of the run; of several runs, in the current directory.")  # fmt: skip
@click.option("--table", "as_table", is_flag=True, help=(
    "Print a row for each run, with the settings and arguments that differ, and whether the bits are equal. Writes "
    "a file only with -o."
))  # fmt: skip
def report(runs: tuple[Path, ...], output: Path | None, as_table: bool) -> int:
    """Write a report of one run, or of several RUNS side by side, as one self-contained HTML file. A folder of runs
    stands for all runs in it.

    It shows the result, the curves, where the workers' time went, every interruption and its cost, and what would make
    the run faster. It can be written while the run is active.
    """
    runs = tuple(each for run in runs for each in _in(run))
    for run in runs:
        if not run.is_dir() or rundir.holder(run) is None:
            raise UsageError(f"there is no run in {run}: it has no {rundir.RUN_FILE} and no journal")
    try:
        accounts = [account(run) for run in runs]
    except OSError as error:
        raise UsageError(f"a run cannot be read: {error}") from error
    table = runs_table(accounts) if as_table or len(accounts) > 1 else None
    if as_table and table is not None:
        say_lines("\n".join(table.lines()))
        if output is None:
            return 0
    target = output or (runs[0] / rundir.REPORT_FILE if len(runs) == 1 else Path(rundir.REPORT_FILE))
    _write(target, made_of(accounts, time.time(), table))
    for each in () if as_table else accounts:
        say(f"{each.name}: {each.sentence}")
        for advice in each.advice[:3]:
            say(f"  {advice.text}")
        for note in each.notes:
            say(f"  not shown: {note}")
    say(f"report written to {target}")
    return 0


def _in(folder: Path) -> list[Path]:
    """Return the runs in a folder; the folder itself, where it is a run or holds none."""
    if not folder.is_dir() or rundir.holder(folder) is not None:
        return [folder]
    return [each for each in sorted(folder.iterdir()) if each.is_dir() and rundir.holder(each) is not None] or [folder]


def _write(target: Path, text: str) -> None:
    """Write the file at once, or leave what is there."""
    try:
        write_whole(target, text.encode())
    except OSError as error:
        raise UsageError(f"the report cannot be written to {target}: {error.strerror or error}") from error
