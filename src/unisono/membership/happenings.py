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
    names = {*before.workers, *after.workers, *before.agents, *after.agents} if touched is None else touched
    come: list[Event] = []
    gone: list[Event] = []
    machines_gone: list[Event] = []
    joined: list[Event] = []
    for name in sorted(names):
        agent, agent_before = after.agents.get(name), before.agents.get(name)
        worker, known = after.workers.get(name), before.workers.get(name)
        if agent is not None and agent_before is None:
            come.append(MachineJoined(agent_id=name, host=agent.host, num_workers=agent.offers))
        if agent is None and agent_before is not None:
            reason = after.absent.get(name, agent_before).gone
            machines_gone.append(MachineGone(agent_id=name, host=agent_before.host, reason=reason))
        if worker is None:
            continue
        if worker.state in _OUT and (known is None or known.state not in _OUT):
            gone.append(_worker_gone(after, worker))
        if worker.generation > 0 and (known is None or known.generation == 0):
            joined.append(_worker_joined(after, worker))
    found = [*come, *gone, *machines_gone, *joined]
    if after.moved > before.moved:
        found += _generation(after)
    if after.ended is not None and before.ended is None:
        ended = after.ended
        found.append(RunEnded(ok=ended.ok, reason=ended.reason, digests={}, step=ended.step, traceback=ended.traceback))
    return tuple(found)


def _worker_joined(after: State, worker: Worker) -> WorkerJoined:
    return WorkerJoined(
        worker_id=worker.worker_id,
        host=_host(after, worker),
        device=worker.info.device if worker.info is not None else "",
        pid=worker.info.pid if worker.info is not None else 0,
        generation=worker.generation,
        step=after.committed + 1,
        reason=worker.came or "the run begins",
        part=worker.part,
    )


def _worker_gone(after: State, worker: Worker) -> WorkerGone:
    return WorkerGone(
        worker_id=worker.worker_id,
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
    agent = state.agents.get(worker.agent) or state.absent.get(worker.agent)
    return worker.host or (agent.host if agent is not None else "")
