"""What has happened between two states of the table, as events: who has come, who has gone, and why.

There is one rule for each kind of event, whatever has led to it. An event's time is that of the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from unisono.core.events import Event, MachineGone, MachineJoined, MembershipChanged, RunEnded, WorkerGone, WorkerJoined
from unisono.membership.roster import GONE, State, Worker, WorkerState

__all__ = ["happenings"]

_OUT = GONE | {WorkerState.ASIDE}


def happenings(before: State, after: State, touched: Collection[str] | None = None) -> tuple[Event, ...]:
    """Return what has happened, in the order in which it is told: who has come and gone, then what follows.

    Args:
        touched: workers and agents that may be another value than before; default: all are looked at.
    """
    looked_at = sorted({*before.workers, *after.workers, *before.agents, *after.agents} if touched is None else touched)
    found: list[Event] = [*_machines_joined(before, after, looked_at)]
    found += _workers_gone(before, after, looked_at)
    found += _machines_gone(before, after, looked_at)
    found += _workers_joined(before, after, looked_at)
    if after.moved > before.moved:
        found += _generation(after)
    if after.ended is not None and before.ended is None:
        ended = after.ended
        found.append(RunEnded(ok=ended.ok, reason=ended.reason, digests={}, step=ended.step, traceback=ended.traceback))
    return tuple(found)


def _machines_joined(before: State, after: State, looked_at: Collection[str]) -> Iterator[MachineJoined]:
    for agent_id in looked_at:
        agent = after.agents.get(agent_id)
        if agent is not None and agent_id not in before.agents:
            yield MachineJoined(agent_id=agent_id, host=agent.host, num_workers=agent.offers)


def _machines_gone(before: State, after: State, looked_at: Collection[str]) -> Iterator[MachineGone]:
    for agent_id in looked_at:
        known = before.agents.get(agent_id)
        if known is not None and agent_id not in after.agents:
            absent = after.absent.get(agent_id, known)
            yield MachineGone(agent_id=agent_id, host=known.host, reason=absent.gone)


def _workers_joined(before: State, after: State, looked_at: Collection[str]) -> Iterator[WorkerJoined]:
    for worker_id in looked_at:
        worker, known = after.workers.get(worker_id), before.workers.get(worker_id)
        if worker is None or worker.generation == 0 or (known is not None and known.generation > 0):
            continue
        yield WorkerJoined(
            worker_id=worker_id,
            host=_host(after, worker),
            device=worker.info.device if worker.info is not None else "",
            pid=worker.info.pid if worker.info is not None else 0,
            generation=worker.generation,
            step=after.committed + 1,
            reason=worker.came or "the run begins",
        )


def _workers_gone(before: State, after: State, looked_at: Collection[str]) -> Iterator[WorkerGone]:
    for worker_id in looked_at:
        worker, known = after.workers.get(worker_id), before.workers.get(worker_id)
        if worker is None or worker.state not in _OUT or (known is not None and known.state in _OUT):
            continue
        yield WorkerGone(
            worker_id=worker_id,
            host=_host(after, worker),
            how=worker.how or "lost",
            reason=worker.gone,
            step=after.committed,
        )


def _generation(after: State) -> Iterator[MembershipChanged]:
    """Yield that the newest generation has begun; one that was overtaken at once is no news."""
    notice = after.notice
    if notice is not None and notice.generation == after.moved:
        yield MembershipChanged(generation=notice.generation, worker_ids=after.members, reason=notice.reason)


def _host(state: State, worker: Worker) -> str:
    """Return the host of a worker: that of its agent where it has not said hello."""
    if worker.info is not None:
        return worker.info.host
    agent = state.agents.get(worker.agent) or state.absent.get(worker.agent)
    return agent.host if agent is not None else ""
