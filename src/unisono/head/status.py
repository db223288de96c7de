"""What the head says of its workers in ``/status``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.decisions.membership.roster import State, Worker, WorkerState

__all__ = ["workers_status"]


def workers_status(state: State) -> list[dict[str, Any]]:
    """Return the workers that have connected, without those that were lost or have left."""
    ranks = {worker_id: rank for rank, worker_id in enumerate(state.members)}
    return [
        _worker_status(ranks, worker)
        for worker in state.workers.values()
        if worker.info is not None and worker.state not in (WorkerState.LEFT, WorkerState.LOST)
    ]


def _worker_status(ranks: Mapping[str, int], worker: Worker) -> dict[str, Any]:
    assert worker.info is not None
    is_member = worker.state in (WorkerState.ADMITTED, WorkerState.HOLDING)
    return {
        "worker_id": worker.worker_id,
        "rank": ranks.get(worker.worker_id) if is_member else None,
        "state": worker.state.value,
        "pid": worker.info.pid,
        "host": worker.info.host,
        "device": worker.info.device,
        "step": worker.beat.step if worker.beat else -1,
        "microbatch": worker.beat.microbatch if worker.beat else -1,
    }
