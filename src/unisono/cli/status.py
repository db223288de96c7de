"""``unisono status``: state of a run that is going, or result of one that has ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from unisono.cli.reach import RUN, NotGoing, ask_status, find
from unisono.errors import UsageError
from unisono.interfaces import is_local
from unisono.invitation import HeadUrl, Invitation, is_invitation
from unisono.words import progress

__all__ = ["status"]


@click.command(epilog=RUN)
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(run: str, as_json: bool) -> int:
    """Show the state of a run, and the line with which other machines join it; or how the run has ended.

    Keep that line to yourself: whoever has it can run programs as you. The lines for watching are for those who look
    only.
    """
    try:
        invitation = find(run)
        found = ask_status(invitation)
        # Where the head is now: the next one may be on another machine.
        now = Invitation(found.get("url") or invitation.url, invitation.token)
        if not now.is_for_looking:
            found["invitation"] = now.line
        found["watch"] = now.for_looking.line
    except NotGoing:
        if run == "-" or is_invitation(run):
            raise
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
    if line := found.get("invitation"):
        invitation = Invitation.parse(line)
        if is_local(HeadUrl.parse(invitation.url).host):
            lines.append("other machines cannot join: the head listens on this machine only (unisono run --bind)")
        else:
            lines.append(f"other machines join with: {invitation.command}")
    if line := found.get("watch"):
        watching = Invitation.parse(line)
        lines.append(f"watch it with: {watching.command}")
        lines.append(f"or in a browser: {watching.page}")
    return "\n".join(lines)
