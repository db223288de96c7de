"""Sentences about what has happened to a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from unisono.core.events import (
    EvaluationFinished,
    MembershipChanged,
    Problem,
    RunStarted,
    WorkerGone,
    WorkerJoined,
    WorkerLate,
)
from unisono.core.words import count, listed
from unisono.record.overview.values import RECENT, Recent

__all__ = ["Told", "checkpoint_name", "checkpoint_words", "evaluation_words", "finite", "late_words"]

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

    def replace(self, topic: str, time: float, text: str, level: str = "info") -> None:
        """Add a sentence instead of the earlier one about the same: of checkpoints the newest counts."""
        self._sentences = [each for each in self._sentences if each.topic != topic]
        self.add(time, text, level, topic)

    def begins(self, event: RunStarted) -> None:
        text = f"the run goes on at step {event.step}" if event.step else "the run begins"
        if not any(each.text.endswith(text) for each in self._sentences[-2:]):  # those who join have said so
            self.add(event.time, text, topic=_BEGINS)

    def wrong(self, event: Problem) -> None:
        """Say what went wrong; that a worker has gone for it needs no sentence of its own."""
        own = f"gone {event.worker_id}"
        if event.worker_id:
            self._sentences[-4:] = [each for each in self._sentences[-4:] if each.topic != own]
        where = f" (evidence: {event.evidence})" if event.evidence else ""
        self.add(event.time, event.text + where, "error", f"problem {event.worker_id}")

    def changed(self, event: MembershipChanged, who: set[str]) -> None:
        """Say that there is another generation, unless sentences say who has joined and gone."""
        unsaid = who - self._said
        self._said.clear()
        if unsaid or not who:
            reason = f": {event.reason}" if event.reason else ""
            workers = count(len(event.worker_ids), "worker")
            self.add(event.time, f"generation {event.generation} with {workers}{reason}", topic=_GENERATION)
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
        names = found.names = sorted(found.names, key=lambda name: (len(name), name))
        who = listed(names) if len(names) <= 4 else f"{count(len(names), 'worker')} ({names[0]} ... {names[-1]})"
        verb = "joins" if len(names) == 1 else "join"
        where = f" on {event.host}" if event.host and len(names) == 1 else ""
        at = f" at step {event.step}" if event.step > 0 else ""
        found.text = f"{who} {verb}{where}{at}" + (f": {event.reason}" if event.reason else "")
        self._sentences[-4:] = [
            each
            for each in self._sentences[-4:]
            if each.topic != _BEGINS or each is found or not found.text.endswith(each.text)
        ]

    def gone(self, event: WorkerGone) -> None:
        self._says(event.worker_id)
        if any(each.topic == f"problem {event.worker_id}" for each in self._sentences[-4:]):
            return
        verb = {"left": "has left", "lost": "was lost", "failed": "has failed", "evicted": "was ended"}[event.how]
        after = f" after step {event.step}" if event.step >= 0 else ""
        where = f" on {event.host}" if event.host else ""
        level = {"left": "info", "failed": "error"}.get(event.how, "warning")
        why = f": {event.reason}" if event.reason else ""
        self.add(event.time, f"{event.worker_id}{where} {verb}{after}{why}", level, f"gone {event.worker_id}")

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


def late_words(event: WorkerLate) -> str:
    where = f"at step {event.step}" + (f", micro-batch {event.microbatch}" if event.microbatch >= 0 else "")
    return f"{event.worker_id} makes no progress for {event.seconds:.0f} s {where}; the others wait for it"


def checkpoint_words(news: Mapping[str, Any]) -> str:
    took = f", {news['bytes'] / 1e6:,.1f} MB in {news['seconds']:.1f} s" if {"bytes", "seconds"} <= news.keys() else ""
    return f"checkpoint {checkpoint_name(news)}{took}"


def evaluation_words(event: EvaluationFinished) -> str:
    totals = ", ".join(f"{name} {value:g}" for name, value in finite(event.values).items())
    return f"evaluation at step {event.step}" + (f": {totals}" if totals else "")


def checkpoint_name(checkpoint: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint from the news about it (`unisono.record.checkpoint_files.step_name`)."""
    return f"step-{checkpoint['step']:010}" if "step" in checkpoint else ""


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values, by name. JSON has no others."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }
