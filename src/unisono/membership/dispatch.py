"""Dispatch of messages: which ones a worker may send in which state, and the rule for each, of each kind of source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from unisono.core.errors import ProtocolError
from unisono.core.messages import (
    AgentHello,
    Beat,
    Convicted,
    Drain,
    Ended,
    Failed,
    Finished,
    Hello,
    Holding,
    Kept,
    Leaving,
    Left,
    Lost,
    MachinesGone,
    Message,
    Offer,
    Ready,
    Scale,
    StepDone,
    Stop,
    Suspect,
    TalkCall,
    TalkDone,
    WorkerExit,
)
from unisono.membership import agents
from unisono.membership.convictions import take_convicted
from unisono.membership.draft import Draft
from unisono.membership.elasticity import measure
from unisono.membership.ending import compare_leavings, forget_leavings, take_finished, take_leaving
from unisono.membership.health import compare_rounds, lose_silent_workers, retry_exchange_when_due, take_suspect, watch
from unisono.membership.hellos import check_protocol, greet
from unisono.membership.parts import part_of
from unisono.membership.restarts import forgive_restarts, lose, replace_suspects, take_exit, take_failure
from unisono.membership.roster import ALIVE, GONE, Worker, WorkerState, excused
from unisono.membership.suspicion import Suspicions
from unisono.membership.talk_rules import take_talk_call, take_talk_done

__all__ = ["TRANSITIONS", "Event", "Lags", "Tick", "TookOver", "take"]

_S = WorkerState
_STAY: Final = None

_REPORTS: Final[Mapping[type[Message], WorkerState | None]] = dict.fromkeys(
    (Hello, Beat, Ready, Holding, Suspect, StepDone, Convicted, Failed, Leaving, TalkDone), _STAY
)
_ENDS: Final[Mapping[type[Message], WorkerState | None]] = {Finished: _S.FINISHED, Left: _S.LEFT}

TRANSITIONS: Final[Mapping[WorkerState, Mapping[type[Message], WorkerState | None]]] = {
    _S.ORDERED: {Hello: _S.STARTING},
    _S.STARTING: {**dict.fromkeys((Hello, Beat, Failed, TalkCall, TalkDone), _STAY), Ready: _S.READY, **_ENDS},
    # A member whose generation was overtaken is READY again, and may have sent reports before it got the notice.
    _S.READY: {**_REPORTS, **_ENDS},
    _S.ADMITTED: {**_REPORTS, **_ENDS, Holding: _S.HOLDING},
    _S.HOLDING: {**_REPORTS, **_ENDS},
    # The others go on without this worker, so its reports no longer count.
    _S.ASIDE: {**_REPORTS, Left: _STAY, Finished: _S.LOST},
    _S.FINISHED: {Hello: _STAY},
    _S.LEFT: {},
    _S.LOST: {},
}
"""State -> message -> next state; None: the message counts, and the state stays the same.

A message that is not listed breaks the protocol and changes nothing. Messages of workers that have FINISHED, LEFT or
are LOST may still be under way; they are ignored.
"""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Lags(msgspec.Struct, frozen=True):
    """An heir has not answered in time that it holds the state."""


class TookOver(msgspec.Struct, frozen=True):
    """This head has followed one of another machine."""

    before: str
    """The agent whose child that head was."""
    is_gone: bool = False
    """That agent is gone for good; else its machine may go on by itself."""


class Event(msgspec.Struct, frozen=True):
    """A message, and the worker or agent that sent it ("": a command from outside the run)."""

    source: str
    message: Message | Tick | Lags | TookOver


def take(draft: Draft, event: Event) -> None:
    """Apply the rule for one event.

    Raises:
        ProtocolError: this source may not send this message now.
    """
    source, message = event.source, event.message
    if isinstance(message, Tick):
        _pass_time(draft)
    elif isinstance(message, TookOver):
        agents.take_over(draft, message.before, is_gone=message.is_gone)
    elif isinstance(message, Lags):
        if source in draft.state.agents:
            draft.put_agent(source, lags=True)
    elif source in draft.state.agents or isinstance(message, AgentHello):
        _take_from_agent(draft, source, message)
    elif source in draft.state.workers or isinstance(message, Hello):
        _take_from_worker(draft, source, message)
    elif isinstance(message, Scale):
        agents.scale(draft, message.num_workers)
    elif isinstance(message, Stop):
        agents.stop(draft, message.reason)
    elif not isinstance(message, Lost):
        raise ProtocolError(f"{source or 'a connection'} sent {type(message).__name__} before a hello")


def _pass_time(draft: Draft) -> None:
    lose_silent_workers(draft)
    for agent_id, gone_at in draft.state.gone_at.items():
        if gone_at <= draft.now:
            agents.leave(draft, agent_id, Lost(reason="its agent did not reconnect"))
    retry_exchange_when_due(draft)


def _take_from_agent(draft: Draft, agent_id: str, message: Message) -> None:
    match message:
        case AgentHello():
            check_protocol(f"the agent of {message.host}", message.protocol)
            agents.join(draft, agent_id, message)
        case WorkerExit():
            _take_step(draft, StepDone(step=message.step, seconds=draft.state.step_seconds))
            take_exit(draft, message)
        case Drain():
            ids = message.worker_ids or [w.worker_id for w in draft.state.workers.values() if w.agent == agent_id]
            host = draft.state.agents[agent_id].host
            why = message.reason or f"the agent of {host} asks for it"
            if not message.worker_ids:
                draft.put_agent(agent_id, gone=why)
            agents.drain(draft, ids, why)
        case Offer():
            agents.offer(draft, agent_id, message.num_workers, message.reason)
        case Scale():
            agents.scale(draft, message.num_workers)
        case Stop():
            agents.stop(draft, message.reason)
        case MachinesGone() if draft.state.agents[agent_id].primary:
            draft.put(ended_machines=message.names)
        case Ended() if draft.state.agents[agent_id].primary:
            draft.end(False, message.reason, exit_code=message.exit_code)
        case Lost():
            agents.leave(draft, agent_id, message)
        case Kept():
            draft.put_agent(agent_id, lags=False)
        case _:
            raise ProtocolError(f"an agent may not send {type(message).__name__}")


def _take_from_worker(draft: Draft, worker_id: str, message: Message) -> None:
    if isinstance(message, Lost):
        worker = draft.state.workers[worker_id]
        if worker.state in ALIVE and worker.closed_at is None:
            draft.put_worker(worker_id, closed_at=draft.now)
        return
    if isinstance(message, Hello):
        check_protocol(f"worker {worker_id}", message.protocol)
        if worker_id not in draft.state.workers:
            _add_unordered(draft, worker_id)
    worker = draft.state.workers[worker_id]
    if worker.state in GONE and not isinstance(message, Hello):
        return
    if isinstance(message, Hello) and not draft.state.is_kin(worker, message.branch) and worker.state in ALIVE:
        lose(draft, worker_id, f"{worker.name} has continued under another head")
        return
    if worker.state is _S.LOST:  # its machine was cut off
        draft.hang_up(worker_id, f"the run continues without {worker.name}: it was out of reach")
    elif worker.state is _S.LEFT:  # it was still starting when it was dismissed
        draft.hang_up(worker_id, f"the run continues without {worker.name}: it was sent away")
    else:
        _take_allowed(draft, worker, message)


def _add_unordered(draft: Draft, worker_id: str) -> None:
    """Add a worker that this head has not ordered: another launcher has, or a head before this one."""
    worker = Worker(worker_id=worker_id, state=_S.ORDERED, part=part_of(draft.state, worker_id))
    draft.add_workers({worker_id: worker})
    draft.put(next_number=max(draft.state.next_number, worker.number + 1))


def _take_allowed(draft: Draft, worker: Worker, message: Message) -> None:
    """Deal with a message if the table allows it in the worker's state."""
    allowed = TRANSITIONS[worker.state]
    if type(message) not in allowed:
        raise ProtocolError(f"{worker.name} is {worker.state.value} and may not send {type(message).__name__}")
    state = draft.state
    newest = max(state.generation, state.unknown)
    following = allowed[type(message)]
    if isinstance(message, Holding):
        if not 0 < message.generation <= newest:
            raise ProtocolError(f"{worker.name} holds generation {message.generation}, the newest is {newest}")
        if message.generation != state.generation and worker.state is _S.ADMITTED:
            following = None  # of a generation that was overtaken; the worker is in the next one as a newcomer
    gap = draft.now - state.witnessed_at
    if gap > state.quiet_s and worker.state is state.witness_state:
        draft.state = excused(state, gap, draft.now)
    was_aside = worker.state is _S.ASIDE
    gone: dict[str, str] = {}
    if following is _S.FINISHED:
        gone = {"how": "finished", "gone": "its script has returned"}
    elif following is _S.LEFT:
        gone = {"how": "left", "gone": worker.gone or state.stopping or "it was asked to leave"}
    worker = draft.put_worker(worker.worker_id, state=following or worker.state, heard_at=draft.now, **gone)
    if worker.state is _S.LOST:
        why = f"{worker.name} has ended its script, but the others had continued without it"
        lose(draft, worker.worker_id, why)
    elif not was_aside or isinstance(message, (Hello, Beat)):
        _act_on(draft, worker, message)


def _act_on(draft: Draft, worker: Worker, message: Message) -> None:
    """Deal with a message that the table allows."""
    match message:
        case Hello():
            greet(draft, worker, message)
        case Ready():
            draft.put_worker(worker.worker_id, phase=message.phase)
        case Holding():
            _take_holding(draft, worker, message)
        case Beat():
            worker = draft.put_worker(worker.worker_id, beat=message, phase=message.phase)
            watch(draft, worker, message)
            compare_leavings(draft, draft.state.workers[worker.worker_id], message)
            compare_rounds(draft, draft.state.workers[worker.worker_id], message)
            forget_leavings(draft)
        case Suspect():
            take_suspect(draft, worker, message)
        case Convicted():
            take_convicted(draft, worker, message)
        case StepDone():
            _take_step(draft, message)
        case Failed():
            take_failure(draft, worker, message)
        case Leaving():
            take_leaving(draft, worker, message)
        case Finished():
            take_finished(draft, worker, message)
        case TalkCall():
            take_talk_call(draft, worker, message)
        case TalkDone():
            take_talk_done(draft, worker, message)
        case Left():
            if worker.worker_id in draft.state.member_ids:
                draft.broken.append(f"{worker.name} has left")
            elif not draft.state.stopping:
                draft.reasons.append(f"{worker.name} has left")


def _take_step(draft: Draft, message: StepDone) -> None:
    """Take note of a step that is done, of which another worker may have told already."""
    if message.step <= draft.state.committed:
        return
    forgive_restarts(draft, message)
    draft.put(committed=message.step, step_seconds=message.seconds, suspicions=Suspicions())
    measure(draft, message)
    replace_suspects(draft, message.step)


def _take_holding(draft: Draft, worker: Worker, message: Holding) -> None:
    if worker.state is not _S.HOLDING:
        return
    generation = max(worker.generation, message.generation)
    draft.put_worker(worker.worker_id, generation=generation, num_unreached=0)
    draft.put(held=True, moved=max(draft.state.moved, message.generation))
    agent = draft.state.agents.get(worker.agent)
    if agent is not None and not agent.has_served:
        draft.put_agent(worker.agent, has_served=True, failure="")
