"""``unisono status``: state of a run that is going, or result of one that has ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from unisono.cli.reach import NotGoing, ask_status, find
from unisono.errors import UsageError
from unisono.words import progress

__all__ = ["status"]


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(run: str, as_json: bool) -> int:
    """Show the state of the run in the directory RUN, or how the run ended."""
    try:
        found = ask_status(find(run))
    except NotGoing:
        found = _afterwards(Path(run))
    click.echo(json.dumps(found, indent=2) if as_json else _words(found))
    return 0


def _afterwards(folder: Path) -> dict[str, Any]:
    """Return the status of a run without a head, from its journal."""
    from unisono import journal, rundir

    if rundir.holder(folder) is None:
        raise UsageError(f"there is no run in {folder}: no journal, and no head that answers")
    try:
        return journal.summary(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"the journal cannot be read: {error}") from error


def _words(found: dict[str, Any]) -> str:
    """Return a status as text."""
    workers = found.get("workers", [])
    lines = [f"{found.get('state', 'unknown')}: {found.get('reason', '')}".rstrip(": ")]
    step, num_steps, loss = found.get("step"), found.get("num_steps", 0), found.get("loss")
    at = progress(step + 1, num_steps) if step is not None else "no step yet"
    lines.append(at + (f", loss {float(loss):.4f}" if loss is not None else ""))
    if found.get("started"):
        lines.append(f"running for {time.time() - found['started']:.0f} s, generation {found.get('generation', 0)}")
    if workers:
        lines.append(f"{'worker':<8}{'rank':<6}{'state':<10}{'pid':<9}{'device':<9}{'step':<7}host")
    for worker in workers:
        rank = "-" if worker.get("rank") is None else worker["rank"]
        lines.append(
            f"{worker['worker_id']:<8}{rank!s:<6}{worker['state']:<10}{worker['pid']:<9}{worker['device']:<9}"
            f"{worker['step']:<7}{worker['host']}"
        )
    return "\n".join(lines)
