"""What the head says of its machines and workers in ``/status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unisono.core.events import MachineUsed
from unisono.membership.roster import ALIVE, Agent, State, Worker, WorkerState

__all__ = ["machines_status", "workers_status"]


def workers_status(state: State) -> list[dict[str, Any]]:
    """Return the workers that have connected, without those that were lost or have left."""
    ranks = {worker_id: rank for rank, worker_id in enumerate(state.members)}
    return [
        _worker_status(ranks, worker)
        for worker in state.workers.values()
        if worker.info is not None and worker.state not in (WorkerState.LEFT, WorkerState.LOST)
    ]


def machines_status(state: State, used: Sequence[MachineUsed]) -> list[dict[str, Any]]:
    """Return the machines that are connected, also those without workers, with what they use; and those on which an
    agent of a launcher has ended, and that have no other one yet.
    """
    numbers = Counter(worker.agent for worker in state.workers.values() if worker.state in ALIVE)
    uses = {use.host: use for use in used}
    found = [_machine_status(agent, numbers[agent.agent_id], uses.get(agent.host)) for agent in state.agents.values()]
    lost = () if state.policy.elastic else sorted({*state.ended_machines}.difference(state.present))
    return found + [
        _machine_status(Agent(agent_id="", host=name, primary=False, offers=0), 0, None, "lost") for name in lost
    ]


def _machine_status(agent: Agent, num_workers: int, use: MachineUsed | None, state: str = "") -> dict[str, Any]:
    return {
        "agent_id": agent.agent_id,
        "host": agent.host,
        "state": state or ("away" if agent.away_at is not None else "connected"),
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
