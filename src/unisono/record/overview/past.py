"""Past of a run: who took part from when to when, and what has interrupted it. Folded from events."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from unisono.core.events import (
    Event,
    Interruption,
    MachineGone,
    MachineJoined,
    RunEnded,
    RunStarted,
    WorkerGone,
    WorkerJoined,
)

__all__ = ["Interrupted", "MachinePresence", "Past", "PastBuilder", "Presence"]

MOST: Final = 10_000
"""So many workers, machines and interruptions are kept, the newest."""


class Presence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker, from when to when it was a member of the run."""

    run_id: str
    worker_id: str
    host: str
    device: str = ""
    pid: int = 0
    generation: int = 0
    step: int = -1
    """The first one that it took part in."""
    joined: float = 0.0
    """In seconds since 1970; 0: it never became a member."""
    why_joined: str = ""
    gone: float = 0.0
    """When it went, or the run ended; 0: nobody has said so."""
    how: str = ""
    """As `unisono.core.events.WorkerGone.how`; "": it was there until the end."""
    why_gone: str = ""
    last_step: int = -1


class MachinePresence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A machine, from when to when its agent was connected."""

    run_id: str
    agent_id: str
    host: str
    num_workers: int
    """That it offered."""
    joined: float
    gone: float = 0.0
    reason: str = ""
    """Why it is gone."""


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """All that happened until the first step of the next generation: a worker that is lost, and the one that replaces
    it.
    """

    run_id: str
    changes: tuple[WorkerJoined | WorkerGone, ...]
    measured: Interruption | None
    """None: nobody has measured how long it was."""

    @property
    def time(self) -> float:
        """When the first of the changes came, in seconds since 1970."""
        return self._first.time

    @property
    def step(self) -> int:
        """The step that took longer; where nobody has measured it, that of the first change."""
        return (self.measured or self._first).step

    @property
    def seconds(self) -> float | None:
        """By which that step was longer than a step usually is; None: nobody has measured it."""
        return self.measured.seconds if self.measured is not None else None

    @property
    def _first(self) -> WorkerJoined | WorkerGone | Interruption:
        first = self.changes[0] if self.changes else self.measured
        assert first is not None, "something has happened"
        return first


class Past(msgspec.Struct, frozen=True):
    """What happened in a directory's runs, the oldest first, at most `MOST` of each."""

    workers: list[Presence]
    machines: list[MachinePresence]
    interruptions: list[Interrupted]

    def of(self, run_id: str) -> Past:
        """Return what happened in one of the runs."""
        return Past(
            [each for each in self.workers if each.run_id == run_id],
            [each for each in self.machines if each.run_id == run_id],
            [each for each in self.interruptions if each.run_id == run_id],
        )


class PastBuilder:
    """Folds the events of a run, in their order, into its past."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._workers: deque[Presence] = deque(maxlen=MOST)
        self._machines: deque[MachinePresence] = deque(maxlen=MOST)
        self._interruptions: deque[Interrupted] = deque(maxlen=MOST)
        self._newest: dict[str, Presence | MachinePresence] = {}
        """By id: its newest presence."""
        self._pending: list[WorkerJoined | WorkerGone] = []
        self._last = 0.0

    def take(self, event: Event) -> None:
        """Count an event."""
        self._last = max(self._last, event.time)
        match event:
            case WorkerJoined():
                self._leave(event.worker_id, event.time)
                self._join(event)
                if event.step > 0:
                    self._pending.append(event)
            case WorkerGone():
                self._go(event)
                if event.how != "finished" and event.step >= 0:
                    self._pending.append(event)
            case MachineJoined() if not self._is_there(event.agent_id):
                machine = MachinePresence(
                    run_id=self.run_id,
                    agent_id=event.agent_id,
                    host=event.host,
                    num_workers=event.num_workers,
                    joined=event.time,
                )
                self._remember(event.agent_id, machine)
                self._machines.append(machine)
            case MachineGone():
                self._leave(event.agent_id, event.time, event.reason)
            case Interruption():
                self._interrupt(event)
            case RunStarted():
                self._interrupt(None)
                self._begin(event.step)
            case RunEnded():
                self._interrupt(None)
                self._end(event.time)

    def go_on_as(self, run_id: str) -> None:
        """Let the events from here on be those of another run in the same directory."""
        self._interrupt(None)
        self._end(self._last)
        self._newest.clear()
        self.run_id = run_id

    def past(self) -> Past:
        """Return the past until now."""
        return Past(
            [msgspec.structs.replace(each) for each in self._workers],
            [msgspec.structs.replace(each) for each in self._machines],
            [*self._interruptions],
        )

    def _is_there(self, name: str) -> bool:
        return name in self._newest and not self._newest[name].gone

    def _remember(self, name: str, there: Presence | MachinePresence) -> None:
        if len(self._newest) > 2 * MOST:
            self._newest = {each: known for each, known in self._newest.items() if not known.gone}
        self._newest[name] = there

    def _join(self, event: WorkerJoined) -> None:
        worker = Presence(
            run_id=self.run_id,
            worker_id=event.worker_id,
            host=event.host,
            device=event.device,
            pid=event.pid,
            generation=event.generation,
            step=event.step,
            joined=event.time,
            why_joined=event.reason,
        )
        self._remember(event.worker_id, worker)
        self._workers.append(worker)

    def _begin(self, step: int) -> None:
        """Note where the run begins, which nobody knew when its first workers came."""
        for each in self._newest.values():
            if isinstance(each, Presence) and each.joined and each.step < step and each.last_step < 0:
                each.step, each.why_joined = step, "the run continues"

    def _go(self, event: WorkerGone) -> None:
        worker = self._newest.get(event.worker_id)
        if not isinstance(worker, Presence):
            worker = Presence(run_id=self.run_id, worker_id=event.worker_id, host=event.host)
            self._remember(event.worker_id, worker)
            self._workers.append(worker)
        if not worker.how:  # the end of the run may have been told before
            worker.gone, worker.how = event.time, event.how
            worker.why_gone, worker.last_step = event.reason, event.step

    def _leave(self, name: str, time: float, reason: str = "") -> None:
        if self._is_there(name):
            there = self._newest[name]
            there.gone = max(time, there.joined)
            if isinstance(there, MachinePresence):
                there.reason = reason

    def _end(self, time: float) -> None:
        for name, each in self._newest.items():
            if isinstance(each, Presence):
                self._leave(name, time)

    def _interrupt(self, measured: Interruption | None) -> None:
        if self._pending or measured is not None:
            changes, self._pending = tuple(self._pending), []
            self._interruptions.append(Interrupted(run_id=self.run_id, changes=changes, measured=measured))
