"""Heartbeats, the most frequent messages to the head. A routine heartbeat costs the same in a run of any size.

Facts about all workers that each heartbeat needs are noted in the state (`roster.noted`), after every event that is
more than a routine heartbeat. `routine` keeps the notes up to date in between.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from unisono.decisions.membership.roster import State, WorkerState
from unisono.messages import Beat

__all__ = ["routine"]

_UNREMARKABLE: Final = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.ADMITTED, WorkerState.HOLDING})


def routine(state: State, worker_id: str, beat: Beat, now: float) -> State | None:
    """Return the state after a heartbeat from which nothing follows; None if something may follow."""
    worker = state.workers.get(worker_id)
    if state.leaving or state.hangs:
        return None  # its position decides what becomes of another worker
    if worker is None or worker.state not in _UNREMARKABLE:
        return None
    is_witness = worker.state is state.witness_state
    if is_witness and now - state.witnessed_at > _calm_s(state):
        return None  # all were silent until now: a worker that is still silent is the only one
    # A worker that was asked to leave may wait for messages that will not come.
    may_hang = worker.state is WorkerState.HOLDING and (worker.draining or not beat.waiting)
    if may_hang and beat.seconds_at > state.limits.shortest_s:
        return None
    workers = dict(state.workers)
    workers[worker_id] = dataclasses.replace(worker, heard_at=now, beat=beat, phase=beat.phase)
    return dataclasses.replace(state, workers=workers, witnessed_at=now if is_witness else state.witnessed_at)


def _calm_s(state: State) -> float:
    """Return the longest silence of all witnesses for which no deadline comes before `State.due_at`.

    `State.due_at` counts all workers that may turn out to be silent alone, except those that are silent for longer than
    that would take; then all witnesses have been silent for longer than this time.
    """
    return state.policy.heartbeat_timeout_s - state.quiet_s
