"""The machines of a run: an agent joins, comes back or leaves; workers are asked to leave, or more are asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from unisono.core.errors import ProtocolError
from unisono.core.messages import AgentHello, Ended, Lost, Start
from unisono.core.words import count, listed, stopping_words
from unisono.membership.draft import Draft
from unisono.membership.parts import numbers_of
from unisono.membership.restarts import lose, order
from unisono.membership.roster import ALIVE, Agent, State, Worker, WorkerState

__all__ = [
    "agent_name",
    "drain",
    "drain_withdrawn",
    "join",
    "leave",
    "offer",
    "resize",
    "scale",
    "stop",
    "take_over",
]

_S = WorkerState
_STAYS: Final = ("stays, as the last one that holds", "stay, as the last ones that hold")


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
        raise ProtocolError(f"agent {agent_id} said hello twice")
    if known is not None and hello.fresh:
        _cut_off(draft, agent_id, "continued under another head")
        known, state = None, draft.state
    if known is not None:
        draft.put_agent(agent_id, away_at=None, lags=False, url=hello.url)
        _repeat_start(draft, agent_id)
        return
    known = enlist(draft, agent_id, hello)
    if twin := _twin(draft.state, agent_id):
        why = f"{hello.host} already has another agent, {twin}, which was started while this one was out of reach"
        draft.put_agent(agent_id, freed=why)
    _repeat_start(draft, agent_id)
    if twin:
        return
    agent = draft.state.agents[agent_id]
    came = "" if hello.primary else f"{hello.host} has joined"
    if known is not None:
        number, came = _missing(draft, agent), f"{hello.host} is back"
    elif draft.state.policy.efficiency:
        number = max(0, min(agent.offers, draft.room()))
    else:
        number = hello.num_workers
    order(draft, agent_id, number, came=came)


def _twin(state: State, agent_id: str) -> str:
    """Return another agent that a launcher has started on the same machine, and that is connected; "": none."""
    name = state.agents[agent_id].launched
    same = (i for i, other in state.agents.items() if name and i != agent_id and other.launched == name)
    return next((i for i in same if not state.agents[i].is_sent_away), "")


def enlist(draft: Draft, agent_id: str, hello: AgentHello) -> Agent | None:
    """Add a machine to those that are connected; return what was known of it, if its connection broke before."""
    state = draft.state
    known = state.absent.get(hello.agent_id)
    is_counted = hello.primary or (hello.launched and state.policy.elastic)  # in `--workers` already
    adds = hello.num_workers if state.policy.grows and not is_counted else 0
    fresh = known or Agent(agent_id=agent_id, host=hello.host, primary=hello.primary, launched=hello.launched)
    agent = msgspec.structs.replace(
        fresh, offers=hello.num_workers, adds=adds, pid=hello.pid, url=hello.url, away_at=None, lags=False, gone=""
    )
    draft.touched.add(agent_id)
    draft.put(
        agents={**state.agents, agent_id: agent},
        absent={
            i: absent
            for i, absent in state.absent.items()
            if i != agent_id and not (hello.launched and absent.launched == hello.launched)  # this one follows it
        },
        num_agents=state.num_agents + (known is None),
        policy=msgspec.structs.replace(state.policy, maximum=state.policy.maximum + adds),
        seat=state.seat or (agent_id if hello.primary else ""),
    )
    if known is not None:
        draft.reasons.append(f"the agent of {hello.host} is back")
    elif not hello.num_workers and not hello.primary:
        draft.reasons.append(f"{hello.host} joins, and offers workers only at certain times (--while)")
    elif not hello.primary:
        draft.reasons.append(f"{hello.host} joins with {count(hello.num_workers, 'worker')}")
    return known


def _missing(draft: Draft, agent: Agent) -> int:
    """Return how many workers a machine that is back has lost meanwhile, as far as there may be so many."""
    state = draft.state
    if agent.is_sent_away or state.finishing or state.stopping:
        return 0
    own = [w for w in draft.staying() if w.agent == agent.agent_id]
    return max(0, min(agent.wanted - len(own), draft.room()))


def _repeat_start(draft: Draft, agent_id: str) -> None:
    """Repeat the last orders to an agent that connects again. The agent starts no worker twice."""
    agent = draft.state.agents[agent_id]
    if agent.is_sent_away:
        draft.send(
            agent_id, Ended(ok=bool(agent.freed), reason=agent.refused or agent.freed, exit_code=int(not agent.freed))
        )
    if agent.primary:
        draft.put(wanted=-1)
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
    why = agent.refused or agent.freed or agent.gone or message.reason
    draft.touched.add(agent_id)
    draft.put(
        agents={i: a for i, a in draft.state.agents.items() if i != agent_id},
        absent={**draft.state.absent, agent_id: msgspec.structs.replace(agent, wanted=wanted, gone=why)},
    )
    if agent.primary and not draft.state.agents:
        draft.end(False, f"the command that started the run has ended ({message.reason})")
        return
    policy = draft.state.policy
    if policy.grows:  # not after `unisono scale`, which sets the number
        draft.put(policy=msgspec.structs.replace(policy, maximum=policy.maximum - agent.adds))
    if not is_told:
        draft.reasons.append(f"the agent of {agent.host} is gone")
    for worker in own:
        if worker.state is _S.ORDERED:
            draft.retire(worker.worker_id, _S.LEFT, "left", f"the agent of {agent.host} is gone")
            draft.reasons.append(f"{worker.worker_id} will not come")


def _cut_off(draft: Draft, agent_id: str, why: str) -> None:
    """Go on without a machine and its workers, which may go on by themselves."""
    own, host = draft.workers_of([agent_id]), {**draft.state.absent, **draft.state.agents}[agent_id].host
    gone = [worker.worker_id for worker in own if worker.state is not WorkerState.ORDERED]
    why = f"{host} {why}" + (f": the run continues without {listed(gone)}" if gone else "")
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
        absent = msgspec.structs.replace(draft.state.absent[before], wanted=0)
        draft.put(absent={**draft.state.absent, before: absent})


def drain(draft: Draft, worker_ids: Iterable[str], why: str) -> None:
    """Ask workers to leave at the end of the step; those that are not members yet leave at once."""
    names = []
    for worker_id in worker_ids:
        worker = draft.state.workers.get(worker_id)
        if worker is None or worker.state not in ALIVE or worker.draining:
            continue
        names.append(worker_id)
        worker = draft.put_worker(worker_id, draining=True, gone=why)
        if worker.state in (_S.ORDERED, _S.STARTING, _S.READY):
            draft.dismiss(worker, f"drained: {why}")
    if names:
        draft.reasons.append(why)
        draft.drained += names


def offer(draft: Draft, agent_id: str, num_workers: int, why: str) -> None:
    """Have more or fewer workers on a machine, or none on one that is in use now (`drain_withdrawn`)."""
    agent, policy = draft.state.agents[agent_id], draft.state.policy
    if agent.offers == num_workers or agent.is_sent_away:
        return
    adds = num_workers if policy.grows and not agent.primary else 0
    if policy.grows:
        policy = msgspec.structs.replace(policy, maximum=policy.maximum + adds - agent.adds)
        draft.put(policy=policy)
    agent = draft.put_agent(agent_id, offers=num_workers, adds=adds, withdrawn="" if num_workers else why)
    draft.reasons.append(f"{agent.host} offers {count(num_workers, 'worker')}: {why}" if num_workers else why)
    if draft.state.finishing or draft.state.stopping:
        return
    own, room = [w for w in draft.staying() if w.agent == agent_id], draft.room()
    if num_workers:
        drain(draft, [w.worker_id for w in own[num_workers:]], why)
    order(draft, agent_id, max(0, min(num_workers - len(own), room)), reason=why, came=why)


def drain_withdrawn(draft: Draft) -> None:
    """Ask the workers of machines that have taken their offer back to leave, unless the run would end with them."""
    for agent_id, agent in draft.state.agents.items():
        staying = draft.staying() if agent.withdrawn else []
        elsewhere = {w.part for w in staying if w.agent != agent_id or not draft.state.held}
        last: dict[int, str] = {}
        own = [w for w in staying if w.agent == agent_id]
        for worker in own:
            if worker.part not in elsewhere:
                last.setdefault(worker.part, worker.worker_id)
        leaving = [w.worker_id for w in own if w.worker_id not in last.values()]
        why = agent.withdrawn
        if last:
            why += f"; {listed(list(last.values()))} {_STAYS[len(last) > 1]} the run's state"
        if leaving:
            drain(draft, leaving, why)


def scale(draft: Draft, num_workers: int) -> None:
    """Change the number of workers; with parts, by whole groups."""
    policy = draft.state.policy
    if num_workers < 1:
        raise ProtocolError(f"a run needs at least 1 worker, got {num_workers}; `unisono stop` ends it")
    if num_workers % policy.parts:
        raise ProtocolError(f"a group has {policy.parts} workers, and {num_workers} workers are no number of groups")
    minimum = min(policy.minimum, num_workers)
    draft.put(
        policy=msgspec.structs.replace(
            policy,
            minimum=minimum,
            start=min(policy.start, num_workers),
            wait_for=min(policy.wait_for, num_workers),
            grows=False,
            efficiency=0.0,
        )
    )
    resize(draft, num_workers)


def resize(draft: Draft, num_workers: int, why: str = "") -> None:
    """Have so many workers from now on, each part of the model as many as the others."""
    policy = msgspec.structs.replace(draft.state.policy, maximum=num_workers)
    draft.put(policy=policy)
    staying = draft.staying()
    size = count(num_workers, "worker")
    if policy.parts > 1:
        size = f"{count(policy.groups, 'group')} of {policy.parts}, {size}"
    why = f"scaled to {size}, from {len(staying)}" + (f": {why}" if why else "")
    draft.reasons.append(why)
    leaving: list[Worker] = []
    for part, number in enumerate(numbers_of(staying, policy.parts)):
        own = [worker for worker in staying if worker.part == part]
        leaving += to_leave(own, draft.state.agents, number - policy.groups, empties=policy.elastic)
    if leaving:
        drain(draft, [worker.worker_id for worker in sorted(leaving, key=lambda worker: worker.number)], why)
        staying = draft.staying()
    missing = num_workers - len(staying)
    if missing > 0:
        _start_more(draft, staying, missing, why)


def _start_more(draft: Draft, staying: Iterable[Worker], missing: int, why: str) -> None:
    """Order new workers from the machines that have room for them."""
    agents = [agent for agent in draft.state.agents.values() if not agent.is_sent_away]
    trusted = [agent for agent in agents if agent.used_restarts < max(draft.state.settings.max_restarts, 1)]
    agents = trusted or agents  # where workers are lost again and again, none is added
    running = Counter(worker.agent for worker in staying)
    if draft.state.policy.elastic:  # the command gets machines for the others
        missing = min(missing, sum(max(agent.offers - running[agent.agent_id], 0) for agent in agents))
        if not missing:
            return
    started = to_start(agents, running, missing)
    for agent_id, number in started.items():
        order(draft, agent_id, number, reason="scaled up", came=why)
    if not started:
        draft.reasons.append("no connected agent could start the missing workers")
    elif len(agents) > 1:
        places = [f"{number} on {draft.state.agents[agent_id].host}" for agent_id, number in started.items()]
        draft.reasons.append(f"{count(missing, 'new worker')}: {listed(places)}")


def stop(draft: Draft, reason: str) -> None:
    """Stop the run at the end of its current step."""
    draft.put(stopping=draft.state.stopping or reason or "stopped")
    draft.reasons.append(stopping_words(draft.state.stopping))


def to_start(agents: Sequence[Agent], running: Mapping[str, int], num_workers: int) -> dict[str, int]:
    """Return how many new workers each of these machines starts, by agent; empty where there is no machine.

    A machine's load is its number of workers divided by the number that it offers. The next worker goes where the load
    is smallest afterwards: to machines with free room first, and in proportion to what they offer beyond that.

    Args:
        running: by agent, the number of its workers that stay.
    """
    able = [agent for agent in agents if agent.offers] or agents[:1]
    counts = Counter(dict(running))
    started: Counter[str] = Counter()
    for _ in range(num_workers if able else 0):
        chosen = min(able, key=lambda agent: ((counts[agent.agent_id] + 1) / max(agent.offers, 1), not agent.primary))
        counts[chosen.agent_id] += 1
        started[chosen.agent_id] += 1
    return dict(started)


def to_leave(
    workers: Sequence[Worker], agents: Mapping[str, Agent], num_workers: int, *, empties: bool = False
) -> list[Worker]:
    """Return the workers that leave: the newest of the machine with the highest load first.

    Workers of a machine that is not connected leave before all others, and the last one of the command's own machine
    leaves last: the run's directory may be on its disk.

    Args:
        workers: those that may leave.
        agents: the machines that are connected.
        empties: take all workers of one machine before those of the next, the machine with the fewest first, so that
            machines become free.
    """
    left = list(workers)
    counts = Counter(worker.agent for worker in left)
    gone = []

    def load(worker: Worker) -> tuple[float, int]:
        agent, number = agents.get(worker.agent), counts[worker.agent]
        if agent is None:
            return math.inf, worker.number
        if agent.primary and (empties or number == 1):
            return -math.inf, worker.number
        return -number if empties else number / max(agent.offers, 1), worker.number

    for _ in range(min(num_workers, len(left))):
        chosen = max(left, key=load)
        left.remove(chosen)
        counts[chosen.agent] -= 1
        gone.append(chosen)
    return gone
