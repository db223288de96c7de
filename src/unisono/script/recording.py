"""Recorder of a worker: makes the events of a run, and gives each to the journal, the script's sinks and the head.

Every member makes the same events in the same order. Three of them go on with an event:

===================  ===================================================================================
the writer           the member that can write into the run's directory writes the line (`Journal`)
the writer           gives the event to the sinks that its script has made (``unisono.Run(sinks=...)``)
rank 0               sends the event to the head, which sends it to the sinks of every machine
===================  ===================================================================================

When a writer is lost, the next one takes the events that the file lacks, writes their lines and gives them to its
sinks. When rank 0 is lost, the next rank 0 sends its last events again, and a receiver recognizes a repeated event by
its number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from unisono.cluster.worker.member import Member
from unisono.core.errors import UsageError
from unisono.core.events import (
    EvaluationFinished,
    Event,
    MembershipChanged,
    Problem,
    RunEnded,
    RunStarted,
    Seconds,
    StepFinished,
    StepResult,
    WorkerTimes,
)
from unisono.core.messages import StepDone
from unisono.core.stragglers import Stragglers
from unisono.core.telemetry import StepTelemetry
from unisono.record.asides import Asides, written
from unisono.record.chronicle import Chronicle
from unisono.record.journal import Journal
from unisono.record.journal.lines import LineEvent
from unisono.record.overview import mean_seconds
from unisono.views.watch import EventStream, Sink

__all__ = ["OUTSIDE", "Recorder", "Role", "Unwatched"]

NUM_REPEATED: Final = 64
"""More than those that rank 0 sends together (`unisono.cluster.worker.connection.MOST_STEPS`) and those that are on
their way."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Role of a worker within the run at the moment of an event."""

    rank: int
    generation: int
    worker_ids: tuple[str, ...]
    """By rank."""
    is_writer: bool
    """The worker writes for all members."""
    hosts: tuple[str, ...] = ()
    """By rank, the host of each worker; empty: there is only one."""
    reason: str = ""
    """Why there is this generation."""


OUTSIDE: Final = Role(rank=-1, generation=0, worker_ids=(), is_writer=False)
"""The role of a worker that has not joined yet, and of one that the others have gone on without."""


class Recorder:
    """Records what happens to a run in this worker. All methods are local and cheap.

    Args:
        sinks: of this worker's script.
        member: None: the script runs alone. Then this worker writes the story of the run (`Chronicle`).
        clock: returns the time of an event, in seconds since 1970.

    Raises:
        UsageError: an object in ``sinks`` is no sink.
    """

    def __init__(
        self, journal: Journal, sinks: Sequence[Sink], member: Member | None, clock: Callable[[], float] = time.time
    ) -> None:
        for sink in sinks:
            _check(sink, "sinks=")
        self._journal = journal
        self._clock = clock
        self._stream = EventStream(sinks)
        self._member = member
        self._to_head = _ToHead(member) if member is not None else None
        self._story = Chronicle() if member is None else None
        self._asides = Asides()
        self._last_step = -1
        self._is_writer = False
        self._generation = 0
        self._began: RunStarted | None = None
        self._is_told = False  # the sinks have been given that event
        self._stragglers = Stragglers()
        self._members: MembershipChanged | None = None  # the newest

    def add_sink(self, sink: Sink) -> None:
        """Give the events from now on to one more sink, on this worker.

        A sink that comes late begins with the start of the run and its members, and then gets what follows.

        Raises:
            UsageError: it is no sink.
        """
        _check(sink, "run.add_sink")
        late = EventStream([sink]) if self._is_writer and self._is_told else None
        if late is not None and self._began is not None:
            late.emit(self._began)
            if self._members is not None:
                late.emit(self._members)
        if late is None or late.has_sinks:
            self._stream.add(sink)

    def run_started(self, started: RunStarted, role: Role, *, is_newcomer: bool) -> None:
        """Record that this worker is in the run.

        Args:
            is_newcomer: the run has begun before, and the other workers have reported so.
        """
        self._began, self._is_told = started, False
        self._tell_alone(started)
        if self._story is not None and started.directory:
            self._story.write_to(Path(started.directory), started.run_id)
        if self._to_head is not None and not is_newcomer:
            self._to_head.start(started, role)
        self._take(role)

    def step_finished(
        self,
        result: StepResult,
        role: Role,
        *,
        num_steps: int,
        seconds: Mapping[str, float],
        telemetry: Mapping[str, StepTelemetry],
        logs: dict[str, float],
        checkpoint: dict[str, Any],
        balance: str,
        warnings: list[str],
        sent_bytes: int = 0,
        audits: Mapping[str, str] | None = None,
    ) -> None:
        """Record that the script has left a step.

        Args:
            num_steps: of the whole run; 0: nobody knows.
            seconds: of the step on this worker, by the names of `Seconds`.
            telemetry: of all members that have summed the step, by worker id.
            checkpoint: news of checkpoints since the step before.
            balance: why this step's plan is another than that of the step before.
            sent_bytes: to other hosts, by this worker, for the step's sums and new parameters.
            audits: by micro-batch, the digest that two members have computed.
        """
        ids = [*telemetry]
        # Checkpoints and balance are no events of their own: a worker that finishes this step after a loss knows
        # neither, and lines are numbered alike on all workers.
        event = StepFinished(
            **{**msgspec.structs.asdict(result), "time": self._now()},
            num_steps=num_steps,
            generation=role.generation,
            seconds=Seconds(**seconds),
            means=mean_seconds([each.last for each in telemetry.values()]),
            workers={worker_id: _times(each, ids) for worker_id, each in telemetry.items()},
            logs=logs,
            sent_bytes=sent_bytes,
            checkpoint=checkpoint,
            balance=balance,
            warnings=warnings,
            audits=dict(audits or {}),
        )
        self._record(event, role)
        if self._is_writer or role.rank == 0:
            self._say_slow(event, role)

    def _say_slow(self, step: StepFinished, role: Role) -> None:
        """Say which worker makes steps longer, or does not any more."""
        hosts = dict(zip(role.worker_ids, role.hosts, strict=False))
        for event in self._stragglers.observe(step.workers, hosts):
            self._pass_on(msgspec.structs.replace(event, time=self._now()), role)

    def evaluation_finished(
        self, step: int, totals: Mapping[str, Any], role: Role, *, logs: Mapping[str, float] | None = None
    ) -> None:
        """Record the totals of an evaluation (numbers, or lists of them), or what ``run.log`` was given, after so many
        steps of the run.
        """
        found = {str(name): value for name, value in totals.items()}
        self._record(EvaluationFinished(time=self._now(), step=step, totals=found, logs=dict(logs or {})), role)

    def last_checkpoint(self, news: Mapping[str, Any], role: Role) -> None:
        """Record what became of the checkpoint that was written after the last step; of the others, steps tell."""
        if news:
            self._pass_on(written(self._now(), news), role)

    def run_ended(
        self,
        role: Role,
        *,
        ok: bool,
        reason: str = "",
        digests: Mapping[str, str] = MappingProxyType({}),
        sha256: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Record that the script is at the end of the run, or has failed.

        Args:
            digests: of every tracked object.
            sha256: of the weights of every tracked module.
        """
        event = RunEnded(time=self._now(), ok=ok, reason=reason, digests=dict(digests), sha256=dict(sha256))
        self._record(event, role)

    def problem(self, event: Problem) -> None:
        """Tell what went wrong in a script that runs alone."""
        self._stream.emit(event)
        if self._story is not None:
            self._story.tell(event)

    def tell_again(self, role: Role) -> None:
        """Send the head the events that an earlier rank 0 may not have sent. Does nothing if rank 0 is the same."""
        if self._to_head is not None:
            self._to_head.tell(None, role)

    def close(self) -> None:
        """Close the sinks. No event follows."""
        self._stream.close()
        if self._story is not None:
            self._story.close()

    def _now(self) -> float:
        return round(self._clock(), 3)

    def _record(self, event: LineEvent, role: Role) -> None:
        self._take(role)
        # The journal is not a sink of the stream: without these lines a run cannot go on from a checkpoint.
        self._pass_on(self._journal.emit(event), role)

    def _take(self, role: Role) -> None:
        """Become the writer, or stop being it; record the members of a new generation."""
        missing: Sequence[Event] = ()
        if role.is_writer != self._is_writer:
            self._is_writer = role.is_writer
            self._is_told = False  # of a writer that becomes it again: another one has gone on meanwhile
            missing = self._journal.start(writer=role.is_writer)
            self._generation = 0
        if self._is_writer:
            if self._began is not None and not self._is_told:
                self._is_told = True
                self._stream.emit(self._began)
            for event in missing:
                self._stream.emit(event)
        if role.generation != self._generation and role is not OUTSIDE:
            self._generation = role.generation
            self._members = MembershipChanged(
                time=self._now(), generation=role.generation, worker_ids=role.worker_ids, reason=role.reason
            )
            self._tell_alone(self._members)
            if self._is_writer:  # the head tells it to all others
                self._stream.emit(self._members)
            self.tell_again(role)

    def _tell_alone(self, event: Event) -> None:
        """Tell the story of a run alone."""
        if self._story is None:
            return
        if isinstance(event, StepFinished):
            self._last_step = event.step
            for aside in self._asides.of(event):
                if isinstance(aside, Problem):
                    self.problem(aside)
                else:
                    self._story.tell(aside)
        elif isinstance(event, RunEnded):
            self._story.tell(msgspec.structs.replace(event, step=self._last_step))
        else:
            self._story.tell(event)

    def _pass_on(self, event: Event, role: Role) -> None:
        self._tell_alone(event)
        if self._is_writer:
            self._stream.emit(event)
        if self._to_head is not None:
            self._to_head.tell(event, role)


class Unwatched(Recorder):
    """Makes no events, and only tells the head how far the run is (`unisono.system.process`)."""

    def step_finished(self, result: StepResult, role: Role, *, seconds: Mapping[str, float], **rest: Any) -> None:
        self._journal.skip()
        if self._member is not None:
            done = StepDone(step=result.step, seconds=sum(seconds.values()), samples=result.samples)
            self._member.step_done(done, tells=role.rank == 0)

    def _record(self, event: LineEvent, role: Role) -> None:
        self._journal.skip()

    def _pass_on(self, event: Event, role: Role) -> None:
        pass


class _ToHead:
    """Sends the events of the run to the head, on rank 0; keeps the last events on all other members."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._is_first = False
        self._recent: deque[Event] = deque(maxlen=NUM_REPEATED)

    def start(self, started: RunStarted, role: Role) -> None:
        """Send the beginning of the run, before every other event, also before earlier evaluations."""
        if role.rank == 0:
            self._member.happened(started)

    def tell(self, event: Event | None, role: Role) -> None:
        """Send an event (None: there is none); if this worker has just become rank 0, first repeat its last events."""
        was_first, self._is_first = self._is_first, role.rank == 0
        if self._is_first:
            for each in (*(() if was_first else self._recent), event):
                if each is not None:
                    self._send(each)
        elif isinstance(event, StepFinished):
            self._note(event)
        if event is not None and event.number >= 0:
            self._recent.append(event)

    def _send(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._note(event)
        self._member.happened(event)

    def _note(self, event: StepFinished) -> None:
        done = StepDone(step=event.step, seconds=event.seconds.total(), samples=event.samples)
        self._member.step_done(done, tells=self._is_first)


def _check(sink: object, what: str) -> None:
    if not isinstance(sink, Sink):
        raise UsageError(f"{what} takes objects with emit(event) and close(); got {sink!r}")


def _times(telemetry: StepTelemetry, worker_ids: Sequence[str]) -> WorkerTimes:
    """Return the times of one worker for an event.

    Args:
        worker_ids: by rank.
    """
    measured = telemetry.times
    return WorkerTimes(
        leaves=telemetry.leaves,
        data=telemetry.data_s,
        compute=telemetry.compute_s,
        last=telemetry.last,
        waits_for=_name(measured.waits_for, worker_ids),
        waits_s=measured.waits_s,
        page_faults=measured.page_faults,
    )


def _name(rank: int, worker_ids: Sequence[str]) -> str:
    return worker_ids[rank] if 0 <= rank < len(worker_ids) else ""
