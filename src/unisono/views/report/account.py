"""Account of a run: what there is to say about it when one looks back, from the files in its directory."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.core.events import Seconds
from unisono.core.words import count, duration
from unisono.record.advice import Advice, AdviceSetting, Load, advise
from unisono.record.checkpoint_files import complete, step_of
from unisono.record.history import History
from unisono.record.history.machines import added_up, steps_of
from unisono.record.journal import JOURNAL, Line
from unisono.record.journal.chain import BEGIN, value_in
from unisono.record.journal.file import tail
from unisono.record.journal.lines import is_number
from unisono.record.overview import Interrupted, Overview, Past, Presence, text_of
from unisono.record.rundir import CERTIFICATE, CHECKPOINTS
from unisono.system.owned import open_regular

__all__ = ["Account", "WorkerAccount", "account", "presences", "words_of"]

POINTS: Final = 1000
PARTS: Final = Seconds.__struct_fields__
LEAST_STEPS: Final = 10
"""No advice follows from fewer: the first steps of a process are slower than all others."""


@dataclass(frozen=True, kw_only=True)
class WorkerAccount:
    """A worker, over the newest steps, of which the times of each worker are kept."""

    worker_id: str
    host: str
    seconds: Mapping[str, float]
    """By part of `Seconds`, in all its steps together."""
    share: float
    """Of the micro-batches of these steps, 0 to 1."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


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
    """As `History.series`, but of the parts of a step."""
    workers: Sequence[WorkerAccount]
    """All that took part in one of the newest steps."""
    since: int
    """The first of these steps."""
    presences: Sequence[Presence]
    interruptions: Sequence[Interrupted]
    advice: Sequence[Advice]
    problems: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    proof: Sequence[tuple[str, str]] = ()
    """Certificate, as rows."""

    @property
    def took(self) -> str:
        """How long the run took, or its part since it was resumed; "": nobody knows."""
        found = self.overview
        last = found.step + 1 - found.first if found.first else 0
        of = f" (the last {count(last, found.unit)})" if last > 0 else ""
        return f"{duration(found.elapsed_s)}{of}" if found.elapsed_s else ""

    @property
    def sentence(self) -> str:
        """How the run went, in one sentence."""
        found = self.overview
        steps = count(found.step + 1, found.unit)
        took = f" in {self.took}" if self.took else ""
        on = f" on {count(found.num_workers, 'worker')}" if found.num_workers else ""
        match found.state:
            case "finished":
                return f"Finished {steps}{took}{on}."
            case "failed":
                return f"Failed after {steps}{took}{on}: {found.reason}".rstrip(": ")
            case "stopped" | "unknown":
                return f"Ended after {steps}{took}{on}" + (
                    f": {found.reason}" if found.reason else ", and wrote no end"
                )
        return f"Running: {steps}{took}{on} so far."


def account(directory: Path) -> Account:
    """Return the account of the run in a directory.

    Raises:
        UsageError: the directory holds no run.
        OSError: it cannot be read.
    """
    history = History(directory)
    history.complete()
    overview = history.overview()
    first, last = history.span()
    times = history.times(first, last, POINTS) if last >= 0 else {}
    past = history.past()
    hosts = {each.worker_id: each.host for each in past.workers if each.joined}
    return Account(
        name=directory.resolve().name,
        directory=directory,
        overview=overview,
        facts=history.facts(),
        first=first,
        last=last,
        series=history.series([name for name in history.names() if not name.startswith("part/")], points=POINTS),
        workers=_workers(times, last, hosts),
        since=min(times.get("step", ()), default=last + 1),
        presences=presences(past, end=overview.ended or overview.time),
        interruptions=past.interruptions,
        advice=advise(_loads(times, last, hosts), _setting(history.facts(), history.use(POINTS), overview.parts))
        if last - first >= LEAST_STEPS - 1
        else [],
        problems=list(history.every_event("problem")),
        notes=list(history.notes),
        proof=_proof(directory),
    )


def _proof(directory: Path) -> list[tuple[str, str]]:
    """Return what a certificate of the run would say, as rows: the chain and the models that its journal ends with."""
    line: Line | None = None
    with contextlib.suppress(OSError), open_regular(directory / JOURNAL) as file:
        _, line, _ = tail(directory / JOURNAL, file)
    if line is None or value_in(line) == BEGIN:
        return []
    found = [(f"{name}.safetensors", f"sha256 {value}") for name, value in (line.get("sha256") or {}).items()]
    found.append((f"Chain up to line {line['line']}", value_in(line).hex()))
    steps = [step_of(path) for path in complete(directory / CHECKPOINTS)]
    found.append(("Checkpoints", f"of the steps {', '.join(map(str, steps))}" if steps else "none kept"))
    has_one = (directory / CERTIFICATE).exists()
    found.append(("Certificate", CERTIFICATE if has_one else "none yet: unisono certify writes it"))
    return found


def presences(past: Past, end: float) -> list[Presence]:
    """Return when each worker was a member, the first one first.

    Args:
        end: of the run, in seconds since 1970; of the workers whose end nobody has told.
    """
    members = [each for each in past.workers if each.joined]
    made = [msgspec.structs.replace(each, gone=each.gone or max(end, each.joined)) for each in members]
    return sorted(made, key=lambda each: (each.joined, each.worker_id))


def words_of(found: Interrupted) -> list[str]:
    """Return each who came or went, in words; where only the cost is known, its reason."""
    if not found.changes and found.measured is not None:
        return [found.measured.reason]
    return [text_of(each) for each in found.changes]


def _workers(times: Mapping[str, Any], last: int, hosts: Mapping[str, str]) -> list[WorkerAccount]:
    """Add up the times of each worker over the newest steps.

    Args:
        times: as `History.times`; a point is the mean of the steps up to the next point.
        last: the last step.
    """
    names: Sequence[str] = times.get("workers", ())
    steps: Sequence[int] = times.get("step", ())
    if not names or not steps:
        return []
    weights, values = steps_of(times, last), times["values"]
    leaves = [added_up(values.get("leaves", ()), weights, place) for place in range(len(names))]
    all_leaves = sum(leaves) or 1.0
    return [
        WorkerAccount(
            worker_id=name,
            host=hosts.get(name, ""),
            seconds={part: added_up(values.get(part, ()), weights, place) for part in PARTS},
            share=leaves[place] / all_leaves,
        )
        for place, name in enumerate(names)
    ]


def _loads(times: Mapping[str, Any], last: int, hosts: Mapping[str, str]) -> list[Load]:
    """Return what each of the last members did, over the steps at the end that all of them did together."""
    names: Sequence[str] = times.get("workers", ())
    values = times.get("values", {})
    if not names or not times["step"]:
        return []

    def there(at: int) -> list[int]:
        return [place for place, leaves in enumerate(values["leaves"][at]) if leaves is not None]

    points = range(len(times["step"]))
    members = there(points[-1])
    begin = next((at + 1 for at in reversed(points) if there(at) != members), 0)
    weights = steps_of(times, last)[begin:]

    def mean(column: str, place: int) -> float:
        rows = values.get(column, ())[begin:]
        return float(added_up(rows, weights, place) / sum(weights))

    loads = []
    for place in members:
        waits: dict[str, float] = {}
        for weight, who, seconds in zip(
            weights, times["waits_for"][begin:], values.get("waits_s", ())[begin:], strict=False
        ):
            if who[place]:
                waits[who[place]] = waits.get(who[place], 0.0) + weight * (seconds[place] or 0.0) / sum(weights)
        loads.append(
            Load(
                worker_id=names[place],
                host=hosts.get(names[place], ""),
                seconds=Seconds(**{part: mean(part, place) for part in PARTS}),
                leaves=mean("leaves", place),
                waits=waits,
                page_faults=mean("page_faults", place),
            )
        )
    return loads


def _setting(facts: Mapping[str, Any], use: Mapping[str, Any], parts: int) -> AdviceSetting:
    """Return how the run was set, as far as its description says it."""
    recipe = facts.get("recipe") or {}
    spare = [
        used["num_cores"] - statistics.fmean(cores)
        for used in use.get("machines", {}).values()
        if used.get("num_cores") and (cores := [value for value in used.get("cores", ()) if is_number(value)])
    ]
    return AdviceSetting(
        microbatches=_whole(recipe.get("microbatches")),
        batch_size=_whole(recipe.get("batch_size")),
        spare_cores=max(0.0, min(spare)) if spare else math.inf,
        wire=str(recipe.get("wire", "fp32")),
        parts=parts,
    )


def _whole(value: Any) -> int:
    """Return a number of a recipe; 0 where it is none."""
    return value if isinstance(value, int) and value > 0 else 0
