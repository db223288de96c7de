"""Account of a run: what there is to say about it when one looks back, from the files in its directory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from unisono.decisions.advice import Advice, advise
from unisono.events import Seconds
from unisono.history import History
from unisono.overview import Overview
from unisono.words import count, duration

__all__ = ["Account", "Interruption", "Presence", "WorkerAccount", "account", "interruptions", "presences"]

POINTS: Final = 1000
PARTS: Final = Seconds.__struct_fields__
MOST_EVENTS: Final = 20_000
NEAR_STEPS: Final = 16
"""So many steps before an interruption show how long a step takes without one."""


@dataclass(frozen=True, kw_only=True)
class WorkerAccount:
    """A worker, over the whole run."""

    worker_id: str
    host: str
    seconds: Mapping[str, float]
    """By part of `Seconds`, in all its steps together."""
    share: float
    """Of the run's micro-batches, 0 to 1."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class Presence:
    """When a worker was a member of the run."""

    worker_id: str
    host: str
    begin: float
    """In seconds since 1970, as `end`."""
    end: float
    how: str
    """How it went (`WorkerGone.how`); "": it was there until the end."""
    came: str
    """Why it came."""
    went: str


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """A step that took longer because workers came or went."""

    step: int
    time: float
    """Of the first of the events, in seconds since 1970."""
    what: tuple[str, ...]
    """Each who came or went, in words."""
    seconds: float | None
    """By which the step was longer than those before it; None: the times of these steps are not known any more."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What there is to say about a run."""

    name: str
    directory: Path
    overview: Overview
    facts: Mapping[str, Any]
    first: int
    """The first and the last step of which there are lines; -1: there is none."""
    last: int
    series: Mapping[str, Mapping[str, Sequence[Any]]]
    """As `History.series`."""
    workers: Sequence[WorkerAccount]
    efficiency: float | None
    """Useful compute / total time of all workers in their steps; None: no time is known."""
    presences: Sequence[Presence]
    interruptions: Sequence[Interruption]
    advice: Sequence[Advice]
    problems: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    evaluations: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """From the start of the run to its end, or to now."""
        found = self.overview
        return max(0.0, (found.ended or found.time) - found.started) if found.started else 0.0

    @property
    def sentence(self) -> str:
        """How the run went, in one sentence."""
        found = self.overview
        steps = count(found.step + 1, "step")
        took = f" in {duration(self.elapsed_s)}" if self.elapsed_s else ""
        on = f" on {count(len({each.worker_id for each in self.workers}), 'worker')}" if self.workers else ""
        match found.state:
            case "finished":
                return f"Finished {steps}{took}{on}."
            case "failed":
                return f"Failed after {steps}{took}{on}: {found.reason}".rstrip(": ")
            case "stopped" | "unknown":
                return f"Ended after {steps}{took}{on}" + (f": {found.reason}" if found.reason else ", and wrote no end")
        return f"Going: {steps}{took}{on} so far."


def account(directory: Path) -> Account:
    """Return the account of the run in a directory.

    Raises:
        UsageError: the directory holds no run.
        OSError: it cannot be read.
    """
    history = History(directory)
    history.refresh()
    overview = history.overview()
    first, last = history.span()
    names = history.names()
    scalars = [name for name in names if not name.startswith(("part/", "evaluation/"))]
    evaluations = [name for name in names if name.startswith("evaluation/")]
    times = history.times(first, last, POINTS) if last >= 0 else {}
    told = history.events(0, MOST_EVENTS)["events"]
    hosts = {each["worker_id"]: each.get("host", "") for each in told if each.get("kind") == "joined"}
    workers = _workers(times, last, hosts)
    total = sum(each.total for each in workers)
    came_and_went = presences(told, end=overview.ended or overview.time)
    return Account(
        name=directory.resolve().name,
        directory=directory,
        overview=overview,
        facts=history.facts(),
        first=first,
        last=last,
        series=history.series([*scalars, *(f"part/{part}" for part in PARTS if f"part/{part}" in names)], points=POINTS),
        evaluations=history.series(evaluations, points=POINTS) if evaluations else {},
        workers=workers,
        efficiency=sum(each.seconds["compute"] for each in workers) / total if total else None,
        presences=came_and_went,
        interruptions=interruptions(told, lambda begin, end: _step_seconds(history, begin, end)),
        advice=advise(times) if workers else [],
        problems=[each for each in told if each.get("kind") == "problem"],
        notes=list(history.notes),
    )


def interruptions(
    told: Sequence[Mapping[str, Any]], step_seconds: Callable[[int, int], Mapping[int, float]]
) -> list[Interruption]:
    """Return what has interrupted the run: workers that came after its first step, or went before its last one.

    Those between the same two steps are one interruption: a worker that is killed, and the one that replaces it.

    Args:
        told: lines of the story, in their order.
        step_seconds: returns the wall time of each step from the first to the last of two numbers, as far as known.
    """
    found: dict[int, list[Mapping[str, Any]]] = {}
    for each in told:
        kind = each.get("kind")
        if kind == "joined" and each.get("step", 0) > 0:
            found.setdefault(int(each["step"]), []).append(each)
        elif kind == "gone" and each.get("how") != "finished":
            found.setdefault(int(each.get("step", -1)) + 1, []).append(each)
    made = []
    for step in sorted(found):
        near = step_seconds(max(0, step - NEAR_STEPS), step)
        usual = [seconds for number, seconds in near.items() if number < step and number not in found]
        seconds = max(0.0, near[step] - statistics.median(usual)) if step in near and usual else None
        whats = tuple(_what(each) for each in found[step])
        made.append(Interruption(step=step, time=_time(found[step][0]), what=whats, seconds=seconds))
    return made


def presences(told: Sequence[Mapping[str, Any]], end: float) -> list[Presence]:
    """Return when each worker was a member, the first one first.

    Args:
        told: lines of the story, in their order.
        end: of the run, in seconds since 1970; of the workers whose end nobody has told.
    """
    made: list[Presence] = []
    there: dict[str, Mapping[str, Any]] = {}

    def went(worker_id: str, at: float, how: str = "", why: str = "") -> None:
        joined = there.pop(worker_id, None)
        if joined is not None:
            made.append(
                Presence(
                    worker_id=worker_id,
                    host=str(joined.get("host", "")),
                    begin=_time(joined),
                    end=max(at, _time(joined)),
                    how=how,
                    came=str(joined.get("reason", "")),
                    went=why,
                )
            )

    for each in told:
        worker_id = str(each.get("worker_id", ""))
        match each.get("kind"):
            case "joined":
                went(worker_id, _time(each))
                there[worker_id] = each
            case "gone":
                went(worker_id, _time(each), str(each.get("how", "")), str(each.get("reason", "")))
            case "end":
                for name in list(there):
                    went(name, _time(each))
    for name in list(there):
        went(name, end)
    return sorted(made, key=lambda each: (each.begin, each.worker_id))


def _what(told: Mapping[str, Any]) -> str:
    """Return who came or went, in words."""
    who = f"{told['worker_id']} on {told['host']}" if told.get("host") else str(told["worker_id"])
    reason = f": {told['reason']}" if told.get("reason") else ""
    if told["kind"] == "joined":
        return f"{who} joined{reason}"
    words = {"lost": "was lost", "failed": "failed", "evicted": "was ended because it hung", "left": "left"}
    return f"{who} {words.get(str(told.get('how')), 'went')}{reason}"


def _time(told: Mapping[str, Any]) -> float:
    return float(told.get("time") or 0.0)


def _workers(times: Mapping[str, Any], last: int, hosts: Mapping[str, str]) -> list[WorkerAccount]:
    """Add up the times of each worker over the run.

    Args:
        times: as `History.times`; a point is the mean of the steps up to the next point.
        last: the last step.
    """
    names: Sequence[str] = times.get("workers", ())
    steps: Sequence[int] = times.get("step", ())
    if not names or not steps:
        return []
    weights = [after - before for before, after in zip(steps, [*steps[1:], last + 1], strict=True)]
    values = times["values"]
    leaves = [_sum(values.get("leaves", ()), weights, place) for place in range(len(names))]
    all_leaves = sum(leaves) or 1.0
    return [
        WorkerAccount(
            worker_id=name,
            host=hosts.get(name, ""),
            seconds={part: _sum(values.get(part, ()), weights, place) for part in PARTS},
            share=leaves[place] / all_leaves,
        )
        for place, name in enumerate(names)
    ]


def _sum(rows: Sequence[Sequence[float | None]], weights: Sequence[int], place: int) -> float:
    return math.fsum(weight * (row[place] or 0.0) for row, weight in zip(rows, weights, strict=False))


def _step_seconds(history: History, begin: int, end: int) -> dict[int, float]:
    """Return the wall time of each step in a short range."""
    found = history.series(["step_s"], begin, end, points=2 * (end - begin + 1))["step_s"]
    if any(low != high for low, high in zip(found["low"], found["high"], strict=True)):
        return {}  # the lines are gone, and only blocks of them are known
    return {step: seconds for step, seconds in zip(found["step"], found["mean"], strict=True) if _is_number(seconds)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
