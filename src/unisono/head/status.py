"""What the head says of its machines and workers in ``/status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unisono.decisions.membership.roster import ALIVE, Agent, Evaluator, State, Worker, WorkerState
from unisono.events import MachineUsed

__all__ = ["machines_status", "workers_status"]


def workers_status(state: State) -> list[dict[str, Any]]:
    """Return the workers and evaluators that have connected, without those that were lost or have left."""
    ranks = {worker_id: rank for rank, worker_id in enumerate(state.members)}
    found = [
        _worker_status(ranks, worker)
        for worker in state.workers.values()
        if worker.info is not None and worker.state not in (WorkerState.LEFT, WorkerState.LOST)
    ]
    return found + [
        _evaluator_status(one) for one in state.evaluators.values() if one.info is not None and one.is_alive
    ]


def machines_status(state: State, used: Sequence[MachineUsed]) -> list[dict[str, Any]]:
    """Return the machines that are connected, also those without workers, with what they use."""
    numbers = Counter(worker.agent for worker in state.workers.values() if worker.state in ALIVE)
    uses = {use.host: use for use in used}
    return [_machine_status(agent, numbers[agent.agent_id], uses.get(agent.host)) for agent in state.agents.values()]


def _machine_status(agent: Agent, num_workers: int, use: MachineUsed | None) -> dict[str, Any]:
    return {
        "agent_id": agent.agent_id,
        "host": agent.host,
        "state": "away" if agent.away_at is not None else "connected",
        "offers": agent.offers,
        "num_workers": num_workers,
        "is_first": agent.primary,
        "use": msgspec.to_builtins(use) if use is not None else None,
    }


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


def _evaluator_status(evaluator: Evaluator) -> dict[str, Any]:
    assert evaluator.info is not None
    beat = evaluator.beat
    return {
        "worker_id": evaluator.worker_id,
        "rank": None,
        "state": evaluator.stage.value,
        "pid": evaluator.info.pid,
        "host": evaluator.info.host,
        "device": evaluator.info.device,
        "step": beat.step if beat else -1,
        "microbatch": beat.microbatch if beat else -1,
    }
