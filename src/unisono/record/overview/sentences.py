"""Sentences about what has happened to a run: every view has these words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from unisono.core.events import (
    Announcement,
    CheckpointWritten,
    EvaluationFinished,
    Event,
    Interruption,
    LinesLost,
    MachineGone,
    MachineJoined,
    MembershipChanged,
    Note,
    Problem,
    RunEnded,
    RunStarted,
    WorkerGone,
    WorkerJoined,
    WorkerLate,
)
from unisono.core.words import count, duration, listed, shown_bytes
from unisono.record.checkpoint_files import step_name
from unisono.record.overview.values import RECENT, Recent

__all__ = ["Told", "finite", "recent_of", "text_of", "with_sentence"]

_GONE: Final = {
    "left": "has left",
    "lost": "was lost",
    "failed": "has failed",
    "evicted": "was ended",
    "finished": "has finished",
}
_BEGINS: Final = "begins"
_GENERATION: Final = "generation"


@dataclass
class _Sentence:
    time: float
    text: str
    level: str
    topic: str
    """Of what there is one sentence; "": of no such thing."""
    names: list[str] = field(default_factory=list)
    """Workers that it is about."""


class Told:
    """The last sentences about a run."""

    def __init__(self) -> None:
        self._sentences: list[_Sentence] = []
        self._said: set[str] = set()
        """Workers of which sentences have said that they have joined or gone, and no generation since."""

    def add(self, time: float, text: str, level: str = "info", topic: str = "") -> None:
        self._sentences.append(_Sentence(time, text, level, topic))
        del self._sentences[:-RECENT]

    def tell(self, event: Event, topic: str = "") -> None:
        """Add the event's own sentence."""
        self.add(event.time, text_of(event), level_of(event), topic)

    def replace(self, event: Event, topic: str) -> None:
        """Add the event's own sentence instead of the earlier one about the same: of checkpoints the newest counts."""
        self._sentences = [each for each in self._sentences if each.topic != topic]
        self.tell(event, topic)

    def begins(self, event: RunStarted) -> None:
        if not any(each.text.endswith(text_of(event)) for each in self._sentences[-2:]):  # those who join have said so
            self.tell(event, _BEGINS)

    def wrong(self, event: Problem) -> None:
        """Say what went wrong; that a worker has gone for it needs no sentence of its own."""
        own = f"gone {event.worker_id}"
        if event.worker_id:
            self._sentences[-4:] = [each for each in self._sentences[-4:] if each.topic != own]
        self.tell(event, f"problem {event.worker_id}")

    def changed(self, event: MembershipChanged, who: set[str]) -> None:
        """Say that there is another generation, unless sentences say who has joined and gone."""
        unsaid = who - self._said
        self._said.clear()
        if unsaid or not who:
            self.tell(event, _GENERATION)
            self._sentences[-1].names = sorted(unsaid)

    def joined(self, event: WorkerJoined) -> None:
        """Say who has joined; workers that join together, in one sentence."""
        self._says(event.worker_id)
        topic = f"joined {event.generation} {event.reason}"
        found = next((each for each in self._sentences[-4:] if each.topic == topic), None)
        if found is None:
            self.add(event.time, "", topic=topic)
            found = self._sentences[-1]
        if event.worker_id not in found.names:
            found.names.append(event.worker_id)
        found.names.sort(key=lambda name: (len(name), name))
        found.text = _joining(found.names, event)
        self._sentences[-4:] = [
            each
            for each in self._sentences[-4:]
            if each.topic != _BEGINS or each is found or not found.text.endswith(each.text)
        ]

    def gone(self, event: WorkerGone) -> None:
        self._says(event.worker_id)
        if any(each.topic == f"problem {event.worker_id}" for each in self._sentences[-4:]):
            return
        self.tell(event, f"gone {event.worker_id}")

    def _says(self, worker_id: str) -> None:
        """Note that a sentence is about this worker, and drop that about the generation, if nobody else has changed."""
        self._said.add(worker_id)
        for each in [each for each in self._sentences[-8:] if each.topic == _GENERATION and worker_id in each.names]:
            each.names.remove(worker_id)
            if not each.names:
                self._sentences.remove(each)
                self._said.discard(worker_id)

    def recent(self) -> list[Recent]:
        return [Recent(time=each.time, text=each.text, level=each.level) for each in self._sentences]


def recent_of(event: Event) -> Recent | None:
    """Return an event as one sentence, with its level; None: there is none about steps, output and what machines use.

    `Told` has fewer sentences: it puts together what belongs together.
    """
    text = text_of(event)
    return Recent(time=event.time, text=text, level=level_of(event)) if text else None


def with_sentence(event: Event | Mapping[str, Any]) -> dict[str, Any]:
    """Return an event, or the line of one, as a mapping with its ``sentence`` and ``level``.

    They are missing where the event has no sentence, or is of a kind that this version does not know.
    """
    known: Event
    if isinstance(event, Mapping):
        line = dict(event)
        try:
            known = msgspec.convert(line, Event, strict=False)
        except msgspec.ValidationError:
            return line
    else:
        line, known = msgspec.to_builtins(event), event
    found = recent_of(known)
    return line if found is None else {**line, "level": found.level, "sentence": found.text}


def level_of(event: Event) -> str:
    """Return info, warning or error."""
    match event:
        case Problem() | RunEnded(ok=False) | WorkerGone(how="failed"):
            return "error"
        case WorkerGone(how="lost" | "evicted") | WorkerLate() | MachineGone() | LinesLost() | Note(about="warning"):
            return "warning"
    return "info"


def text_of(event: Event) -> str:
    """Return the sentence of an event; "": it has none."""
    match event:
        case RunStarted():
            return f"the run continues at step {event.step}" if event.step else "the run begins"
        case RunEnded():
            if not event.ok:
                return f"the run failed: {event.reason}"
            return "the run has finished" if event.reason in ("", "finished") else f"the run has ended: {event.reason}"
        case MembershipChanged():
            return f"generation {event.generation} with {count(len(event.worker_ids), 'worker')}{_why(event.reason)}"
        case WorkerJoined():
            return _joining([event.worker_id], event)
        case WorkerGone():
            after = f" after step {event.step}" if event.step >= 0 else ""
            return f"{event.worker_id}{_on(event.host)} {_GONE[event.how]}{after}{_why(event.reason)}"
        case WorkerLate():
            where = f"at step {event.step}" + (f", micro-batch {event.microbatch}" if event.microbatch >= 0 else "")
            return f"{event.worker_id} has made no progress for {event.seconds:.0f} s {where}; the others wait for it"
        case MachineJoined():
            return f"{event.host} offers {count(event.num_workers, 'worker')}"
        case MachineGone():
            return f"{event.host} is gone{_why(event.reason)}"
        case Interruption():
            cost = duration(event.seconds) if event.seconds > 0 else "no time"
            return f"generation {event.generation} cost {cost} at step {event.step}{_why(event.reason)}"
        case CheckpointWritten():
            took = f", {shown_bytes(event.bytes)} in {event.seconds:.1f} s" if event.bytes and event.seconds else ""
            return f"checkpoint {step_name(event.step)}{took}"
        case EvaluationFinished():
            totals = ", ".join(f"{name} {value:g}" for name, value in finite(event.values).items())
            return f"evaluation at step {event.step}{_why(totals)}"
        case LinesLost():
            return f"the journal lacks the lines {event.first} to {event.last}: they could not be written"
        case Problem():
            return event.text + (f" (evidence: {event.evidence})" if event.evidence else "")
        case Note() | Announcement():
            return event.text
    return ""


def _joining(names: Sequence[str], event: WorkerJoined) -> str:
    """Return the sentence about workers that join together, of whose events this is one."""
    who = listed(names) if len(names) <= 4 else f"{count(len(names), 'worker')} ({names[0]} ... {names[-1]})"
    verb = "joins" if len(names) == 1 else "join"
    where = _on(event.host) if len(names) == 1 else ""
    at = f" at step {event.step}" if event.step > 0 else ""
    return f"{who} {verb}{where}{at}{_why(event.reason)}"


def _on(host: str) -> str:
    return f" on {host}" if host else ""


def _why(reason: str) -> str:
    return f": {reason}" if reason else ""


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values, by name. JSON has no others."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }
