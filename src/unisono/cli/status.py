"""``unisono watch --once``: state of a run that is going, or result of one that has ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.cli.looking import as_invitation
from unisono.cli.reach import NotGoing, ask_status, find
from unisono.cli.saying import say, say_json, say_lines
from unisono.cluster.trust.invitation import HeadUrl, Invitation, is_invitation
from unisono.core.errors import UsageError
from unisono.core.words import count, number, part_words, progress, shown_bytes
from unisono.record import rundir
from unisono.record.history import History
from unisono.system.interfaces import is_local
from unisono.views import date

__all__ = ["runs_in", "show_once"]

EVENTS_SHOWN: Final = 20
SHOWN: Final = 20
"""So many lines of a kind are shown to people."""


def show_once(run: str, *, as_json: bool) -> int:
    """Show the state of a run, and the line with which other machines join it; or how the run has ended.

    Of a folder with several runs, each has a line.
    """
    try:
        invitation = find(as_invitation(run))
        found = ask_status(invitation)
        # Where the head is now: the next one may be on another machine.
        now = Invitation(found.get("url") or invitation.url, invitation.token)
        if not now.is_for_looking:
            found["invitation"] = now.line
        found["watch"] = now.for_looking.line
    except NotGoing:
        if run == "-" or is_invitation(as_invitation(run)):
            raise
        if runs := runs_in(Path(run)):
            if as_json:
                say_json(runs)
            else:
                say_lines(_list_words(runs))
            return 0
        found = _afterwards(Path(run))
    if as_json:
        say_json(found)
    else:
        for line in _words(found):
            say(line)
    return 0


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Return the runs whose directories lie in a folder, by name; none where the folder is a run itself."""
    if not folder.is_dir() or rundir.holder(folder) is not None:
        return []
    found = []
    for run in sorted(folder.iterdir()):
        if not run.is_dir() or rundir.holder(run) is None:
            continue
        history = History(run)
        found.append(history.status())
        if history.is_unreadable:
            found[-1]["reason"] = f"the journal cannot be read: {'; '.join(history.notes)}"
    return found


def _list_words(runs: list[dict[str, Any]]) -> str:
    """Return the runs as text, a line each."""
    columns = max(len(run["run_dir"]) for run in runs)
    lines = []
    for run in runs:
        step, loss = run.get("step"), run.get("loss")
        done = "no step yet"
        if step is not None and step >= 0:
            done = progress(step + 1, run.get("num_steps", 0), run.get("unit", "step"))
        at = done + (f", loss {number(float(loss))}" if loss is not None else "")
        lines.append(f"{run['run_dir']:<{columns}}  {run['state']:<9} {at}".rstrip())
    return "\n".join(lines)


def _afterwards(folder: Path) -> dict[str, Any]:
    """Return the status of a run without a head, from its files."""
    if rundir.holder(folder) is None:
        raise UsageError(f"there is no run in {folder}: it has no journal, and no head answers")
    history = History(folder)
    history.complete()
    status, notes = history.status(), history.notes
    events = history.events(-EVENTS_SHOWN, EVENTS_SHOWN)["events"]
    if history.is_unreadable and not events:
        raise UsageError(f"the journal cannot be read: {'; '.join(notes)}")
    past = history.past()
    return {
        "schema": rundir.STATUS_SCHEMA,
        **status,
        "machines": [msgspec.to_builtins(each) for each in past.machines],
        "past_workers": [msgspec.to_builtins(each) for each in past.workers],
        "interruptions": [
            msgspec.to_builtins(each.measured) for each in past.of(status["run_id"]).interruptions if each.measured
        ],
        "events": events,
        "notes": notes,
    }


def _words(found: dict[str, Any]) -> list[str]:
    """Return a status as lines of text."""
    reason = found.get("reason") or ""
    state = found.get("state", "unknown")
    lines = [state if reason == state else f"{state}: {reason}".rstrip(": ")]
    step, num_steps, loss = found.get("step"), found.get("num_steps", 0), found.get("loss")
    at = progress(step + 1, num_steps, found.get("unit", "step")) if step is not None else "no step yet"
    lines.append(at + (f", loss {number(float(loss))}" if loss is not None else ""))
    lines += _times(found)
    lines += _workers(found.get("workers", []), found.get("parts", 1))
    lines += _machines(found.get("machines", []))
    lines += _past_workers(found.get("past_workers", []))
    lines += _interruptions(found.get("interruptions", []))
    lines += _problems(found.get("events", []))
    lines += found.get("notes", [])
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
    return lines


def _times(found: dict[str, Any]) -> list[str]:
    """Return when the run began and ended, and how well it has used its time."""
    started, ended = found.get("started") or 0.0, found.get("ended") or 0.0
    words = []
    if started and ended:
        words.append(f"from {date(started)} to {date(ended)}, {ended - started:.0f} s")
    elif started and "url" in found:
        words.append(f"running for {time.time() - started:.0f} s, generation {found.get('generation', 0)}")
    elif started:
        words.append(f"since {date(started)}")
    if (efficiency := found.get("efficiency")) is not None:
        words.append(f"{efficiency:.0%} of the workers' time was spent on computing")
    if found.get("interruptions"):
        words.append(f"interrupted for {found.get('interrupted_s', 0.0):.1f} s in all")
    return ["; ".join(words)] if words else []


def _workers(workers: list[dict[str, Any]], num_parts: int) -> list[str]:
    wide = len(part_words(num_parts - 1, num_parts)) + 2 if num_parts > 1 else 0
    heading = f"{'worker':<8}{'part':<{wide}}" if wide else f"{'worker':<8}"
    lines = [f"{heading}{'rank':<6}{'state':<10}{'pid':<9}{'device':<9}{'step':<7}host"] if workers else []
    for worker in workers:
        part = part_words(worker.get("part", 0), num_parts)
        rank = "-" if worker.get("rank") is None else worker["rank"]
        lines.append(
            f"{worker['worker_id']:<8}{part:<{wide}}{rank!s:<6}{worker['state']:<10}{worker['pid']:<9}{worker['device']:<9}"
            f"{worker['step']:<7}{worker['host']}"
        )
    return lines


def _machines(machines: list[dict[str, Any]]) -> list[str]:
    """Return the machines: what they use now, or when they were there."""
    lines = []
    for machine in machines[-SHOWN:]:
        if "joined" in machine:
            gone = f", gone {date(machine['gone'])} ({machine.get('reason', '')})" if machine.get("gone") else ""
            offered = count(machine["num_workers"], "worker")
            lines.append(f"machine {machine['host']} came {date(machine['joined'])} with {offered}{gone}")
            continue
        words = [count(machine["num_workers"], "worker") if machine["num_workers"] else "no worker"]
        if machine["state"] == "lost":
            words = ["its agent has ended, and is started again after a pause, unless it has left in order"]
        elif machine["state"] != "connected":
            words.append("has not connected to this head yet")
        if use := machine.get("use"):
            words.append(f"{use['cores']:.1f} of {use['num_cores']} cores busy")
            words.append(f"{shown_bytes(use['memory_bytes'])} of {shown_bytes(use['memory_total_bytes'])} in use")
            sent, received = shown_bytes(use["sent_bytes_per_s"]), shown_bytes(use["received_bytes_per_s"])
            words.append(f"{sent}/s sent, {received}/s received")
        lines.append(f"machine {machine['host']}: {', '.join(words)}")
    return [*_more(machines, "machine"), *lines]


def _past_workers(workers: list[dict[str, Any]]) -> list[str]:
    lines = []
    for worker in workers[-SHOWN:]:
        joined = worker.get("joined")
        came, went = "never took part", ""
        if joined:
            came = f"came {date(joined)} at step {worker['step']} ({worker.get('why_joined', '')})"
        if worker.get("how") and worker.get("gone"):
            after = f" after step {worker['last_step']}" if worker.get("last_step", -1) >= 0 else ""
            went = f"; {worker['how']} {date(worker['gone'])}{after} ({worker.get('why_gone', '')})"
        elif worker.get("gone"):
            went = f"; heard of last {date(worker['gone'])}"
        lines.append(f"{worker['worker_id']} on {worker['host']} {came}{went}")
    return [*_more(workers, "worker"), *lines]


def _interruptions(interruptions: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"interrupted {date(each['time'])} for {each['seconds']:.2f} s, in step {each['step']}: {each['reason']}"
        for each in interruptions[-SHOWN:]
    ]
    return [*_more(interruptions, "interruption"), *lines]


def _problems(told: list[dict[str, Any]]) -> list[str]:
    """Return the newest problems; the evidence is a file in the run's directory."""
    lines = []
    for each in told:
        if each.get("kind") == "problem":
            evidence = f" (evidence: {each['evidence']})" if each.get("evidence") else ""
            lines.append(f"{each['problem']} {date(each['time'])}: {each['text']}{evidence}")
    return lines


def _more(values: list[dict[str, Any]], noun: str) -> list[str]:
    left = len(values) - SHOWN
    return [f"{count(left, noun)} before these: --json shows all"] if left > 0 else []
