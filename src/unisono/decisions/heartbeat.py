"""Heartbeats, which are most of what the head hears: one that asks for no decision costs the same in a run of any size.

So what `unisono.decisions.membership` would look up among all workers at each of them is noted in the state, after
every event that is more than such a heartbeat (`unisono.decisions.roster.noted`). `routine` keeps it right in between.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from unisono.decisions.roster import State, WorkerState
from unisono.messages import Beat

__all__ = ["routine"]

_UNREMARKABLE: Final = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.ADMITTED, WorkerState.HOLDING})


def routine(state: State, worker_id: str, beat: Beat, now: float) -> State | None:
    """The state after a heartbeat from which nothing follows; None where something may."""
    worker = state.workers.get(worker_id)
    if state.leaving or state.hangs:
        return None  # where this worker is says what becomes of another one
    if worker is None or worker.state not in _UNREMARKABLE:
        return None
    is_witness = worker.state is state.witness_state
    if is_witness and now - state.witnessed_at > _calm_s(state):
        return None  # all were silent: whoever is silent still is so alone now
    # Whoever is to leave and waits may wait for what will not come.
    may_hang = worker.state is WorkerState.HOLDING and (worker.draining or not beat.waiting)
    if may_hang and beat.seconds_at > state.limits.shortest_s:
        return None
    workers = dict(state.workers)
    workers[worker_id] = dataclasses.replace(worker, heard_at=now, beat=beat, phase=beat.phase)
    return dataclasses.replace(state, workers=workers, witnessed_at=now if is_witness else state.witnessed_at)


def _calm_s(state: State) -> float:
    """While witnesses are heard so often, nobody's deadline comes to lie before `State.due_at`.

    That counts whoever may turn out to be silent alone, but for those who are silent for longer than that would take;
    then all witnesses have been silent for longer than this.
    """
    return state.policy.heartbeat_timeout_s - state.quiet_s
