"""The machines of a run: an agent joins, comes back or leaves; workers are asked to leave, or more are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from unisono.decisions.membership.draft import Draft
from unisono.decisions.membership.restarts import lose, order
from unisono.decisions.membership.roster import ALIVE, Agent, State, WorkerState
from unisono.errors import ProtocolError
from unisono.messages import AgentHello, Ended, Lost, Start
from unisono.words import count, listed

__all__ = ["agent_name", "drain", "join", "leave", "scale", "stop", "take_over"]

_S = WorkerState


def agent_name(state: State, hello: AgentHello) -> str:
    """Return the name of an agent: its old one if it comes back, maybe before its old connection is seen to break."""
    known = {**state.absent, **state.agents}.get(hello.agent_id)
    is_back = known is not None and (known.host, known.pid) == (hello.host, hello.pid)
    return hello.agent_id if is_back else f"agent{state.num_agents}"


def join(draft: Draft, agent_id: str, hello: AgentHello) -> None:
    """An agent says hello, for the first time or again."""
    state = draft.state
    known = state.agents.get(agent_id)
    if known is not None and hello.agent_id != agent_id:
        raise ProtocolError(f"agent {agent_id} has said hello twice")
    if known is not None and hello.fresh:
        _cut_off(draft, agent_id, "went on under another head")
        known, state = None, draft.state
    if known is not None:
        draft.put_agent(agent_id, away_at=None, lags=False, url=hello.url)
        _repeat_start(draft, agent_id)
        return
    known = state.absent.get(hello.agent_id)
    adds = hello.num_workers if state.policy.grows and not hello.primary else 0
    fresh = known or Agent(agent_id=agent_id, host=hello.host, primary=hello.primary)
    agent = dataclasses.replace(
        fresh, offers=hello.num_workers, adds=adds, pid=hello.pid, url=hello.url, away_at=None, lags=False
    )
    draft.put(
        agents={**state.agents, agent_id: agent},
        absent={i: absent for i, absent in state.absent.items() if i != agent_id},
        num_agents=state.num_agents + (known is None),
        policy=dataclasses.replace(state.policy, maximum=state.policy.maximum + adds),
        seat=state.seat or (agent_id if hello.primary else ""),
    )
    if known is not None:
        draft.reasons.append(f"the agent of {hello.host} is back")
    elif not hello.primary:
        draft.reasons.append(f"{hello.host} joins with {count(hello.num_workers, 'worker')}")
    _repeat_start(draft, agent_id)
    order(draft, agent_id, hello.num_workers if known is None else _missing(draft, agent))


def _missing(draft: Draft, agent: Agent) -> int:
    """Return how many workers a machine that is back has lost meanwhile, as far as there may be so many."""
    state = draft.state
    if agent.refused or state.finishing or state.stopping:
        return 0
    alive = [w for w in draft.workers(*ALIVE) if not w.draining]
    own = [w for w in alive if w.agent == agent.agent_id]
    return max(0, min(agent.wanted - len(own), state.policy.maximum - len(alive)))


def _repeat_start(draft: Draft, agent_id: str) -> None:
    """Repeat the last orders to an agent that connects again. The agent starts no worker twice."""
    if refused := draft.state.agents[agent_id].refused:
        draft.send(agent_id, Ended(ok=False, reason=refused, exit_code=1))
    for worker in draft.workers(_S.ORDERED):
        if worker.agent == agent_id:
            delay_s = max(0.0, worker.heard_at - draft.now)
            draft.send(agent_id, Start(worker_ids=[worker.worker_id], delay_s=delay_s))


def leave(draft: Draft, agent_id: str, message: Lost, *, is_told: bool = False) -> None:
    """Remove an agent whose connection has closed, or that has not connected to a head that has taken over.

    Args:
        is_told: the user is told of it in other words.
    """
    agent = draft.state.agents[agent_id]
    own = draft.workers_of([agent_id])
    wanted = sum(not worker.draining for worker in own)
    draft.put(
        agents={i: a for i, a in draft.state.agents.items() if i != agent_id},
        absent={**draft.state.absent, agent_id: dataclasses.replace(agent, wanted=wanted)},
    )
    if agent.primary and not draft.state.agents:
        draft.end(False, f"the command that started the run has ended ({message.reason})")
        return
    policy = draft.state.policy
    if policy.grows:  # not after `unisono scale`, which sets the number
        draft.put(policy=dataclasses.replace(policy, maximum=policy.maximum - agent.adds))
    if not is_told:
        draft.reasons.append(f"the agent of {agent.host} is gone")
    for worker in own:
        if worker.state is _S.ORDERED:
            draft.put_worker(worker.worker_id, state=_S.LEFT)


def _cut_off(draft: Draft, agent_id: str, why: str) -> None:
    """Go on without a machine and its workers, which may go on by themselves."""
    own, host = draft.workers_of([agent_id]), {**draft.state.absent, **draft.state.agents}[agent_id].host
    gone = [worker.worker_id for worker in own if worker.state is not WorkerState.ORDERED]
    why = f"{host} {why}" + (f": the run goes on without {listed(gone)}" if gone else "")
    if agent_id in draft.state.agents:
        leave(draft, agent_id, Lost(reason=why), is_told=True)
    for worker in own:
        if draft.state.workers[worker.worker_id].state in ALIVE:
            lose(draft, worker.worker_id, why, replace=False)
    if not gone:
        draft.reasons.append(why)


def take_over(draft: Draft, before: str, *, is_gone: bool) -> None:
    """Go on without the machine of the head before this one, which another agent has followed.

    Args:
        before: the agent whose child that head was.
        is_gone: that agent is gone for good; else its machine may go on by itself.
    """
    if before not in {**draft.state.agents, **draft.state.absent}:
        return
    if draft.state.ended is not None:
        draft.put(agents={i: agent for i, agent in draft.state.agents.items() if i != before})
        return
    _cut_off(draft, before, "is out of reach, with the head")
    if is_gone:
        absent = dataclasses.replace(draft.state.absent[before], wanted=0)
        draft.put(absent={**draft.state.absent, before: absent})


def drain(draft: Draft, worker_ids: Iterable[str], why: str) -> None:
    """Ask workers to leave at the end of the step; those that are not members yet leave at once."""
    names = []
    for worker_id in worker_ids:
        worker = draft.state.workers.get(worker_id)
        if worker is None or worker.state not in ALIVE or worker.draining:
            continue
        names.append(worker_id)
        worker = draft.put_worker(worker_id, draining=True)
        if worker.state in (_S.ORDERED, _S.STARTING, _S.READY):
            draft.dismiss(worker, f"drained: {why}")
    if names:
        draft.reasons.append(why)
        draft.drained += names


def scale(draft: Draft, num_workers: int) -> None:
    """Change the number of workers."""
    if num_workers < 1:
        raise ProtocolError(f"a run has at least 1 worker, got {num_workers}; `unisono stop` ends it")
    policy = draft.state.policy
    minimum = min(policy.minimum, num_workers)
    start = min(policy.start, num_workers)
    draft.put(policy=dataclasses.replace(policy, minimum=minimum, start=start, maximum=num_workers, grows=False))
    staying = [w for w in draft.workers(*ALIVE) if not w.draining]
    missing = num_workers - len(staying)
    why = f"scaled to {count(num_workers, 'worker')}, from {len(staying)}"
    draft.reasons.append(why)
    if missing < 0:
        drain(draft, [w.worker_id for w in staying[missing:]], why)
    elif missing > 0:
        agents = sorted(
            (agent for agent in draft.state.agents.values() if not agent.refused),
            key=lambda agent: (not agent.offers, not agent.primary),
        )
        if agents:
            order(draft, agents[0].agent_id, missing, reason="scaled up")
        else:
            draft.reasons.append("no agent is connected that could start the missing workers")


def stop(draft: Draft, reason: str) -> None:
    """End the run at the end of the step."""
    draft.put(stopping=draft.state.stopping or reason or "stopped")
    draft.reasons.append(f"{draft.state.stopping}: the run ends at the end of the step")
