"""Heartbeats, the most frequent messages to the head. A routine heartbeat costs the same in a run of any size.

The heartbeats that an agent reports for its workers are taken together, except those from which something may follow.

Facts about all workers that each heartbeat needs are noted in the state (`roster.noted`), after every event that is
more than a routine heartbeat. `routine` keeps the notes up to date in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from unisono.core.messages import Beat, BeatOf
from unisono.membership.dispatch import TRANSITIONS
from unisono.membership.hangs import BegunRound
from unisono.membership.roster import State, Worker, WorkerState

__all__ = ["routine", "routine_of_many"]

_UNREMARKABLE: Final = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.ADMITTED, WorkerState.HOLDING})


def routine(state: State, worker_id: str, beat: Beat, now: float) -> State | None:
    """Return the state after a heartbeat from which nothing follows; None if something may follow."""
    worker = state.workers.get(worker_id)
    if worker is None or not _Rule.of(state, now).is_routine(worker, beat):
        return None
    workers = dict(state.workers)
    workers[worker_id] = worker.heard(now, beat)
    is_witness = worker.state is state.witness_state
    return msgspec.structs.replace(state, workers=workers, witnessed_at=now if is_witness else state.witnessed_at)


def routine_of_many(state: State, beats: Sequence[BeatOf], now: float) -> tuple[State, Sequence[BeatOf]]:
    """Return the state after the heartbeats up to the first from which something may follow, and those from it on.

    Left out are those of workers that have no connection. Of a worker that is known to have got further (it has spoken
    for itself in between) only the time counts.
    """
    if state.ended is not None:
        return state, ()
    rule, workers, witnessed_at = _Rule.of(state, now), dict(state.workers), state.witnessed_at
    rest: Sequence[BeatOf] = ()
    for number, each in enumerate(beats):
        worker, beat = workers.get(each.worker_id), each.beat
        if worker is None or worker.closed_at is not None or Beat not in TRANSITIONS[worker.state]:
            continue
        if worker.beat is not None and beat.progress < worker.beat.progress:
            beat = worker.beat
        elif not rule.is_routine(worker, beat):
            rest = tuple(beats[number:])
            break
        heard_at = max(worker.heard_at, now - each.seconds_ago)
        workers[each.worker_id] = worker.heard(heard_at, beat)
        if worker.state is state.witness_state:
            witnessed_at = max(witnessed_at, heard_at)
    return msgspec.structs.replace(state, workers=workers, witnessed_at=witnessed_at), rest


class _Rule(NamedTuple):
    """What the state says about heartbeats."""

    is_calm: bool
    """No worker's position decides what becomes of another one."""
    silent: WorkerState | None
    """All workers in this state were silent until now; None: there is no such state."""
    shortest_s: float
    begun: BegunRound | None
    """The round in which a member was seen to wait last."""

    @staticmethod
    def of(state: State, now: float) -> _Rule:
        # If all were silent until now, a worker that is still silent is the only one.
        were_silent = now - state.witnessed_at > _calm_s(state)
        is_calm = not state.leaving and not state.hangs
        return _Rule(is_calm, state.witness_state if were_silent else None, state.limits.shortest_s, state.begun)

    def is_routine(self, worker: Worker, beat: Beat) -> bool:
        """Return whether nothing follows from a heartbeat."""
        if not self.is_calm or worker.state not in _UNREMARKABLE or worker.state is self.silent:
            return False
        if beat.round >= 0 and not (self.begun is not None and self.begun.is_of(beat)):
            return False
        # A worker that was asked to leave may wait for messages that will not come.
        may_hang = worker.state is WorkerState.HOLDING and (worker.draining or not beat.waiting)
        return not may_hang or beat.seconds_at <= self.shortest_s


def _calm_s(state: State) -> float:
    """Return the longest silence of all witnesses for which no deadline comes before `State.due_at`.

    `State.due_at` counts all workers that may turn out to be silent alone, except those that are silent for longer than
    that would take; then all witnesses have been silent for longer than this time.
    """
    return state.settings.heartbeat_timeout_s - state.quiet_s
