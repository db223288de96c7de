"""Plain scripts: those for torchrun, which do not use this library and never say hello.

All processes are started together (an *attempt*), and know each other's number by their environment. So whatever
changes, all are ended, and all are started again: a process has failed (``--max-restarts`` times at most), a machine is
lost, leaves or comes, the number is changed::

    machines come --> Meet --> MeetingPoint --> Start (to all)  --all exit with 0-->  the run ends
         ^                                        |
         +---- all processes have ended <--Evict--+  one fails, or the machines change

The agent of rank 0 looks for the port at which the processes meet.
"""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from unisono.decisions.membership import agents
from unisono.decisions.membership.admission import check_protocol
from unisono.decisions.membership.attempts import Attempt, Failure, Part, spread
from unisono.decisions.membership.dispatch import Event, Lags, Tick, TookOver
from unisono.decisions.membership.draft import Draft
from unisono.decisions.membership.roster import ALIVE, Agent, How, Worker, WorkerState
from unisono.errors import ProtocolError
from unisono.messages import (
    AgentHello,
    Drain,
    Ended,
    Evict,
    Kept,
    Lost,
    MachinesGone,
    Meet,
    MeetingPoint,
    Message,
    Offer,
    Scale,
    Start,
    Stop,
    Team,
    WorkerExit,
)
from unisono.problems.kinds import Trouble
from unisono.words import count, exit_words

__all__ = ["END_S", "SETTLE_S", "follow_up", "take"]

_S = WorkerState

SETTLE_S: Final = 2.0
"""After a machine has come, others are waited for so long, if there may be more."""
END_S: Final = 30.0
"""Time of a process from SIGTERM to SIGKILL."""


def take(draft: Draft, event: Event) -> None:
    """Apply the rule for one event.

    Raises:
        ProtocolError: this source may not send this message now.
    """
    source, message = event.source, event.message
    if isinstance(message, Tick):
        _pass_time(draft)
    elif isinstance(message, TookOver):
        if message.before in draft.state.agents:
            _leave(draft, message.before, Lost(reason="its machine is out of reach, with the head"))
    elif isinstance(message, Lags):
        if source in draft.state.agents:
            draft.put_agent(source, lags=True)
    elif isinstance(message, AgentHello):
        check_protocol(f"the agent of {message.host}", message.protocol)
        _join(draft, source, message)
    elif source in draft.state.agents:
        _take_from_agent(draft, source, message)
    elif isinstance(message, Scale):
        _scale(draft, message.num_workers)
    elif isinstance(message, Stop):
        _stop(draft, message.reason)
    elif not isinstance(message, Lost):
        raise ProtocolError(f"{source or 'a connection'} sent {type(message).__name__} to a run of a plain script")


def _take_from_agent(draft: Draft, agent_id: str, message: Message) -> None:
    agent = draft.state.agents[agent_id]
    match message:
        case WorkerExit():
            _take_exit(draft, agent, message)
        case MeetingPoint():
            _start(draft, message)
        case Drain():
            why = message.reason or f"{agent.host} leaves"
            draft.put_agent(agent_id, offers=0, gone=why)
            _end_attempt_of(draft, agent_id, why)
        case Offer():
            _offer(draft, agent_id, message)
        case Scale():
            _scale(draft, message.num_workers)
        case Stop():
            _stop(draft, message.reason)
        case MachinesGone() if agent.primary:
            draft.put(num_gone=message.number)
        case Ended() if agent.primary:
            draft.end(False, message.reason, exit_code=message.exit_code)
        case Lost():
            _leave(draft, agent_id, message)
        case Kept():
            draft.put_agent(agent_id, lags=False)
        case _:
            raise ProtocolError(f"an agent may not send {type(message).__name__}")


def _pass_time(draft: Draft) -> None:
    for agent_id, gone_at in draft.state.gone_at.items():
        if gone_at <= draft.now:
            _leave(draft, agent_id, Lost(reason="its agent has not connected again"))


# -- machines ----------------------------------------------------------------------------------------


def _join(draft: Draft, agent_id: str, hello: AgentHello) -> None:
    state, attempt = draft.state, draft.state.attempt
    is_here = agent_id in state.agents
    if is_here and hello.agent_id != agent_id:
        raise ProtocolError(f"agent {agent_id} has said hello twice")
    if is_here:
        draft.put_agent(agent_id, away_at=None, lags=False)
    else:
        agents.enlist(draft, agent_id, hello)
        draft.put(settled_at=draft.now + SETTLE_S)
        for worker in state.workers.values():
            if worker.agent == agent_id and worker.state is _S.LOST:  # it may run on a machine that was cut off
                _evict(draft, worker, "the others have gone on without it")
    if attempt is None or not is_here:
        return
    if attempt.is_started:
        _repeat_orders(draft, agent_id, attempt)
    elif attempt.parts[0].agent == agent_id:
        draft.send(agent_id, Meet(attempt=attempt.number))


def _offer(draft: Draft, agent_id: str, offer: Offer) -> None:
    """Have more or fewer processes on a machine: fewer at once, more when `_grow` finds it worth a start of all."""
    agent = draft.state.agents[agent_id]
    if agent.offers == offer.num_workers:
        return
    draft.put_agent(agent_id, offers=offer.num_workers)
    draft.put(settled_at=draft.now + SETTLE_S)
    if offer.num_workers < agent.offers:
        _end_attempt_of(draft, agent_id, offer.reason or f"{agent.host} offers {count(offer.num_workers, 'process')}")


def _leave(draft: Draft, agent_id: str, message: Lost) -> None:
    host = draft.state.agents[agent_id].host
    running = [worker for worker in _running(draft) if worker.agent == agent_id]
    agents.leave(draft, agent_id, message)
    for worker in running:
        draft.retire(worker.worker_id, _S.LOST, "lost", f"the machine {host} is lost")
    attempt = draft.state.attempt
    if attempt is None or draft.state.ended is not None:
        return
    if running:
        _end_attempt(draft, f"the machine {host} is lost")
    elif not attempt.is_started and agent_id in attempt.names():
        draft.put(attempt=msgspec.structs.replace(attempt, ending=f"the machine {host} is lost"))


def _end_attempt_of(draft: Draft, agent_id: str, why: str) -> None:
    """End the attempt if this machine has a part in it that is not over."""
    attempt = draft.state.attempt
    if attempt is None or agent_id not in attempt.names():
        return
    if not attempt.is_started or any(worker.agent == agent_id for worker in _running(draft)):
        _end_attempt(draft, why)


def _scale(draft: Draft, num_processes: int) -> None:
    if num_processes < 1:
        raise ProtocolError(f"a run has at least 1 worker, got {num_processes}; `unisono stop` ends it")
    policy, able = draft.state.policy, _able(draft)
    minimum, start = min(policy.minimum, num_processes), min(policy.start, num_processes)
    draft.put(
        policy=msgspec.structs.replace(
            policy,
            minimum=minimum,
            start=start,
            maximum=num_processes,
            grows=False,
            wait_for=min(policy.wait_for, num_processes),
        ),
        settled_at=draft.now,
    )
    missing = num_processes - sum(agent.offers for agent in able)
    if missing > 0 and able:
        draft.put_agent(able[0].agent_id, offers=able[0].offers + missing)
    attempt = draft.state.attempt
    before = attempt.num_processes if attempt is not None else 0
    why = f"scaled to {count(num_processes, 'process')}, from {before}"
    if attempt is not None and before != num_processes:
        _end_attempt(draft, why)
    else:
        draft.reasons.append(why)


def _stop(draft: Draft, reason: str) -> None:
    draft.put(stopping=draft.state.stopping or reason or "stopped")
    _end_attempt(draft, draft.state.stopping)


# -- processes ---------------------------------------------------------------------------------------


def _take_exit(draft: Draft, agent: Agent, message: WorkerExit) -> None:
    worker, attempt, code = draft.state.workers.get(message.worker_id), draft.state.attempt, message.exit_code
    if worker is None or worker.state not in ALIVE:
        return
    if not code:
        draft.retire(worker.worker_id, _S.FINISHED, "finished", "its script has returned")
    elif attempt is not None and attempt.ending and code in (-signal.SIGTERM, -signal.SIGKILL):
        draft.retire(worker.worker_id, _S.LOST, "left", attempt.ending)
    else:
        how: How = "failed" if code > 0 else "lost"
        draft.retire(worker.worker_id, _S.LOST, how, f"worker {worker.worker_id} {exit_words(code)}")
    if not code or attempt is None:
        return
    if attempt.ending and not (attempt.failures and message.failed_at):
        return  # it was ended, or has failed at the loss of a machine
    failure = Failure(
        name=worker.worker_id,
        host=agent.host,
        exit_code=0 if attempt.ending and code in (-signal.SIGTERM, -signal.SIGKILL) else code,
        at=message.failed_at,
        last_output=message.last_output,
    )
    draft.put(attempt=msgspec.structs.replace(attempt, failures=(*attempt.failures, failure)))
    _end_attempt(draft, failure.words())


def _end_attempt(draft: Draft, why: str) -> None:
    """End all processes. When all have ended, `follow_up` finds out what comes next."""
    attempt = draft.state.attempt
    if attempt is None or attempt.ending:
        return
    draft.put(attempt=msgspec.structs.replace(attempt, ending=why))
    running = _running(draft)
    draft.reasons.append(f"{why}; all processes are ended" if running else why)
    for worker in running:
        _evict(draft, worker, why)


def _evict(draft: Draft, worker: Worker, why: str) -> None:
    if worker.agent in draft.state.agents:
        draft.send(worker.agent, Evict(worker_id=worker.worker_id, reason=why, patience_s=END_S))


def _running(draft: Draft) -> list[Worker]:
    return [worker for worker in draft.state.workers.values() if worker.state in ALIVE]


# -- attempts ----------------------------------------------------------------------------------------


def follow_up(draft: Draft) -> None:
    """Start all processes, or end the run, where the new state asks for it; and note when time may change that."""
    if draft.state.ended is None:
        _look(draft)
    if draft.state.ended is None:
        times = [*draft.state.gone_at.values()]
        if draft.state.settled_at > draft.now:
            times.append(draft.state.settled_at)
        draft.put(due_at=min(times, default=None))


def _look(draft: Draft) -> None:
    state, attempt = draft.state, draft.state.attempt
    if attempt is None:
        _form(draft, 1, 0)
    elif _running(draft):
        if not attempt.ending:
            _grow(draft, attempt)
    elif attempt.ending:
        _go_on(draft, attempt)
    elif attempt.is_started:
        draft.end(True, f"{_words(attempt.num_processes)} ended with exit code 0")
    elif state.stopping:
        draft.end(True, state.stopping)


def _say_failure(draft: Draft, cause: Failure, *, ends_run: bool) -> None:
    words = cause.words().removeprefix(f"{cause.name} on {cause.host} ")
    last = cause.last_output.strip().rpartition("\n")[2]
    draft.alarm(
        Trouble(
            kind="error",
            worker_id=cause.name,
            host=cause.host,
            error=f"it {words}" + (f"; its last line: {last}" if last else ""),
            traceback=cause.last_output,
            then="the run ends" if ends_run else "all processes are started again",
            ends_run=ends_run,
        )
    )


def _go_on(draft: Draft, attempt: Attempt) -> None:
    """Begin the next attempt, or end the run if too many have failed. Now all failures are known."""
    cause, restarts, most = attempt.cause, attempt.restarts, draft.state.policy.max_restarts
    if cause is not None and not draft.state.stopping:
        _say_failure(draft, cause, ends_run=restarts >= most)
    if cause is None or draft.state.stopping:
        _form(draft, attempt.number + 1, restarts, attempt.ending)
        return
    if restarts >= most:
        spent = "the only restart is used" if most == 1 else f"all {most} restarts are used"
        why = f"{cause.words()}; {spent} (--max-restarts)" if most else cause.words()
        draft.end(False, why, cause.name, cause.last_output, cause.exit_code or 1)
        return
    if cause.last_output:
        for agent in draft.state.agents.values():
            if agent.primary:
                draft.announce_to(agent.agent_id, f"the last output of {cause.name}:\n{cause.last_output}")
    why = f"{cause.words()}; restart {restarts + 1} of {most}"
    draft.reasons.append(why)
    draft.put(attempt=msgspec.structs.replace(attempt, failures=(), restarts=restarts + 1, ending=why))
    _form(draft, attempt.number + 1, restarts + 1, why)


def _words(number: int) -> str:
    return "the process has" if number == 1 else f"all {number} processes have"


def _able(draft: Draft) -> list[Agent]:
    """Return the agents that offer processes, that of the command which has started the run first."""
    able = [agent for agent in draft.state.agents.values() if agent.offers and not agent.refused]
    return sorted(able, key=lambda agent: not agent.primary)


def _parts(draft: Draft) -> tuple[Part, ...]:
    return spread({agent.agent_id: agent.offers for agent in _able(draft)}, draft.state.policy.maximum)


def _form(draft: Draft, number: int, restarts: int, why: str = "") -> None:
    """Begin an attempt, if there are enough machines: its first order is to find a port."""
    state, policy = draft.state, draft.state.policy
    if state.stopping:
        draft.end(True, state.stopping)
        return
    attempt = Attempt(number=number, parts=_parts(draft), restarts=restarts, why=why)
    found = attempt.num_processes
    may_grow = found < policy.maximum and state.settled_at > draft.now
    # Machines of the command that are known not to come are not waited for.
    are_complete = bool(policy.machines) and not state.num_coming
    is_there = any(agent.primary for agent in state.agents.values())
    first = policy.least if are_complete and is_there else policy.begins_with
    needed = policy.minimum if number > 1 else first
    if found < needed and policy.wait_for and state.attempt is None and 0 < found != state.waits_with:
        draft.put(waits_with=found)
        draft.reasons.append(
            f"there is room for {found} of {count(needed, 'process')}; they start when there is room for all {needed}"
        )
        draft.invite()
    if found < needed and state.attempt is not None and not state.attempt.waits:
        draft.put(attempt=msgspec.structs.replace(state.attempt, waits=True))
        draft.reasons.append(f"paused: the machines have room for {found} of at least {count(needed, 'process')}")
    if found < needed or may_grow:
        return
    draft.put(attempt=attempt)
    draft.send(attempt.parts[0].agent, Meet(attempt=number))


def _grow(draft: Draft, attempt: Attempt) -> None:
    """End an attempt where machines that have come allow one with more processes, unless a process is through."""
    workers = draft.state.workers
    names = [name for names in attempt.names().values() for name in names]
    if any(workers[name].state is _S.FINISHED for name in names):
        return
    found = sum(part.num_processes for part in _parts(draft))
    is_settled = found == draft.state.policy.maximum or draft.state.settled_at <= draft.now
    if found > attempt.num_processes and is_settled:
        _end_attempt(draft, f"there is room for {found} processes instead of {attempt.num_processes}")


def _start(draft: Draft, point: MeetingPoint) -> None:
    attempt = draft.state.attempt
    if attempt is None or attempt.is_started or attempt.ending or attempt.number != point.attempt:
        return
    attempt = msgspec.structs.replace(attempt, is_started=True, address=point.address, port=point.port)
    ids = attempt.names()
    came = f"start {attempt.number} of all processes: {attempt.why}" if attempt.why else ""
    workers = {
        name: Worker(
            worker_id=name, state=_S.HOLDING, agent=agent, heard_at=draft.now, generation=attempt.number, came=came
        )
        for agent, names in ids.items()
        for name in names
    }
    # Those of machines that are out of reach are ended if these come back.
    away = {i: known for i, known in draft.state.workers.items() if known.agent not in draft.state.agents}
    draft.put(attempt=attempt, workers=away, moved=attempt.number)
    draft.add_workers(workers)
    for agent_id in ids:
        _order(draft, agent_id, attempt)
    number, machines = attempt.num_processes, len(attempt.parts)
    where = f" on {machines} machines" if machines > 1 else ""
    draft.reasons.append(f"{count(number, 'process')}{where} {'starts' if number == 1 else 'start'}")


def _order(draft: Draft, agent_id: str, attempt: Attempt) -> None:
    """Order a machine's part; the agent starts no process twice."""
    position = [part.agent for part in attempt.parts].index(agent_id)
    team = Team(
        first_rank=sum(part.num_processes for part in attempt.parts[:position]),
        world_size=attempt.num_processes,
        group_rank=position,
        num_groups=len(attempt.parts),
        address=attempt.address,
        port=attempt.port,
        restarts=attempt.restarts,
        max_restarts=draft.state.policy.max_restarts,
    )
    draft.send(agent_id, Start(worker_ids=attempt.names()[agent_id], team=team))


def _repeat_orders(draft: Draft, agent_id: str, attempt: Attempt) -> None:
    """Repeat the orders to an agent that connects again: a head before this one may not have sent them."""
    if agent_id not in attempt.names():
        return
    if not attempt.ending:
        _order(draft, agent_id, attempt)
        return
    for worker in _running(draft):
        if worker.agent == agent_id:
            _evict(draft, worker, attempt.ending)
