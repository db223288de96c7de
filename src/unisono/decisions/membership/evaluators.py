"""Evaluators: workers that follow the run and compute evaluations, while the members train on.

They are no members: no generation has them, nobody waits for them before a step, and what becomes of one of them breaks
no exchange. So they stand beside the workers in the state, with rules of their own:

* a member asks (`EvaluationWanted`) whether an evaluation is taken; if it is not, the members compute it at once;
* an evaluation that is taken goes to the first evaluator that is free, and to another one if that one is lost;
* where none is left, or the evaluator could not do it, it is **open**: the members compute it when they come to it.

While an evaluation is under way or open, no newcomer is admitted: it would lack the models of that step. And while a
newcomer waits, no evaluation is taken, so it does not wait for long. Totals are kept until the members say that all of
them have them (`EvaluationsOpen`): a connection may break while they are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from unisono.decisions.membership.draft import Draft
from unisono.decisions.membership.likeness import objection
from unisono.decisions.membership.roster import (
    Evaluation,
    Evaluator,
    EvaluatorStage,
    State,
    Worker,
    WorkerState,
)
from unisono.errors import ProtocolError
from unisono.messages import (
    PROTOCOL,
    Beat,
    Ended,
    EvaluationAnswer,
    EvaluationDone,
    EvaluationEnded,
    EvaluationsOpen,
    EvaluationWanted,
    Evict,
    Failed,
    Finished,
    Hello,
    Left,
    Lost,
    Message,
    Ready,
    Start,
    TalkAnswer,
    TalkCall,
    WorkerExit,
)
from unisono.words import exit_words

__all__ = [
    "forget_evaluations",
    "holds_joins",
    "is_slow",
    "lose_evaluators_of",
    "lose_silent_evaluators",
    "order_evaluators",
    "repeat_news",
    "settle_evaluations",
    "take_evaluator_exit",
    "take_from_evaluator",
    "take_open",
    "take_wanted",
]

_S = EvaluatorStage

MOST_TRIES: Final = 2
"""An evaluation with which so many evaluators were lost is left to the members."""


# -- evaluators come and go --------------------------------------------------------------------------


def order_evaluators(draft: Draft, agent_id: str, number: int, delay_s: float = 0.0, reason: str = "") -> None:
    """Order so many new evaluators from an agent."""
    first = draft.state.num_evaluators
    ids = [f"e{first + index}" for index in range(number)]
    if not ids:
        return
    new = {i: Evaluator(worker_id=i, agent=agent_id, heard_at=draft.now + delay_s) for i in ids}
    draft.put(evaluators={**draft.state.evaluators, **new}, num_evaluators=first + number)
    draft.send(agent_id, Start(worker_ids=ids, delay_s=delay_s, reason=reason))


def take_from_evaluator(draft: Draft, worker_id: str, message: Message) -> None:
    """Deal with a message of an evaluator.

    Raises:
        ProtocolError: an evaluator may not send this.
    """
    known = draft.state.evaluators.get(worker_id)
    if isinstance(message, Lost):
        if known is not None and known.is_alive and known.closed_at is None:
            _put(draft, worker_id, closed_at=draft.now)
        return
    if known is None and isinstance(message, Hello):  # a head before this one has ordered it
        known = Evaluator(worker_id=worker_id)
        draft.put(evaluators={**draft.state.evaluators, worker_id: known})
        draft.put(num_evaluators=max(draft.state.num_evaluators, known.number + 1))
    if known is None or not known.is_alive:
        draft.hang_up(worker_id, f"the run goes on without evaluator {worker_id}")
        return
    evaluator = _put(draft, worker_id, heard_at=draft.now)
    match message:
        case Hello():
            _greet(draft, evaluator, message)
        case Beat():
            _put(draft, worker_id, beat=message)
            if is_slow(draft.state, evaluator, message):
                _lose(draft, worker_id, f"evaluator {worker_id} makes no progress for {message.seconds_at:.0f} s")
        case Ready():
            if evaluator.stage is not _S.FOLLOWING:
                _put(draft, worker_id, stage=_S.FOLLOWING)
                draft.reasons.append(f"evaluator {worker_id} follows the run")
        case TalkCall():
            _put(draft, worker_id, call=message)
        case EvaluationDone():
            _take_done(draft, evaluator, message)
        case Failed():
            _lose(draft, worker_id, f"evaluator {worker_id} failed: {message.error}", message.traceback)
        case Finished() | Left():
            _put(draft, worker_id, stage=_S.FINISHED)
            _take_back(draft, worker_id)
        case _:
            pass  # what a member would say of itself, and nobody waits for from an evaluator


def _greet(draft: Draft, evaluator: Evaluator, message: Hello) -> None:
    worker_id = evaluator.worker_id
    if message.protocol != PROTOCOL or message.info.worker_id != worker_id:
        raise ProtocolError(f"evaluator {worker_id} speaks protocol {message.protocol}, and the head {PROTOCOL}")
    stage = _S.STARTING if evaluator.stage is _S.ORDERED else evaluator.stage
    evaluator = _put(draft, worker_id, stage=stage, info=message.info, closed_at=None)
    # Its totals would have other bits, and nobody would compare them with those of another worker.
    if text := objection(draft.state, message):
        why = f"evaluator {worker_id} on {message.info.host} {text}: it is refused"
        draft.send(worker_id, Ended(ok=False, reason=why, worker_id=worker_id, exit_code=1))
        _lose(draft, worker_id, why, is_replaced=False)
        return
    for each in draft.state.evaluations.values():
        if each.evaluator == worker_id:
            draft.send(worker_id, each.wanted)


def take_evaluator_exit(draft: Draft, message: WorkerExit) -> None:
    """Note the end of an evaluator's process."""
    known = draft.state.evaluators.get(message.worker_id)
    if known is None or not known.is_alive:
        return
    if known.stage is _S.FINISHED:
        _put(draft, message.worker_id, stage=_S.GONE)
        return
    why = f"evaluator {message.worker_id} {exit_words(message.exit_code)}"
    _lose(draft, message.worker_id, why, message.last_output)


def lose_silent_evaluators(draft: Draft) -> None:
    """Lose the evaluators whose time is over (`roster.evaluators_due`)."""
    for worker_id, due in draft.state.evaluators_due().items():
        if due <= draft.now:
            _lose(draft, worker_id, f"evaluator {worker_id} has been silent for too long")


def lose_evaluators_of(draft: Draft, agent_id: str, why: str) -> None:
    """Go on without the evaluators of a machine."""
    for evaluator in list(draft.state.evaluators.values()):
        if evaluator.agent == agent_id and evaluator.is_alive:
            _lose(draft, evaluator.worker_id, f"evaluator {evaluator.worker_id} has gone: {why}", is_replaced=False)


def is_slow(state: State, evaluator: Evaluator, beat: Beat) -> bool:
    """Return whether an evaluator hangs: it has an evaluation to do, waits for nobody, and makes no progress."""
    is_busy = any(each.evaluator == evaluator.worker_id for each in state.evaluations.values())
    return is_busy and not beat.waiting and beat.seconds_at > state.limits.hang_s


def _lose(draft: Draft, worker_id: str, why: str, output: str = "", *, is_replaced: bool = True) -> None:
    evaluator = _put(draft, worker_id, stage=_S.GONE)
    draft.reasons.append(why)
    if output:
        draft.announce_to(evaluator.agent, f"the last output of evaluator {worker_id}:\n{output}")
    if evaluator.agent in draft.state.agents:
        draft.send(evaluator.agent, Evict(worker_id=worker_id, reason=why))
    draft.hang_up(worker_id, why)
    _take_back(draft, worker_id)
    if is_replaced:
        _replace(draft, evaluator)


def _take_back(draft: Draft, worker_id: str) -> None:
    """Let another evaluator do what one of them had to do."""
    for number, each in draft.state.evaluations.items():
        if each.evaluator == worker_id:
            _put_evaluation(draft, number, evaluator="", tries=each.tries + 1)


def _replace(draft: Draft, evaluator: Evaluator) -> None:
    state, agent = draft.state, draft.state.agents.get(evaluator.agent)
    if agent is None or agent.is_sent_away or agent.gone or state.finishing or state.stopping:
        return
    used = sum(other.agent == evaluator.agent and other.stage is _S.GONE for other in state.evaluators.values())
    if used > state.policy.max_restarts:
        draft.reasons.append(f"it is not replaced: all {state.policy.max_restarts} restarts are used (--max-restarts)")
        return
    delay_s = 0.0 if used <= 1 else min(30.0, 2.0 ** (used - 2))
    reason = f"evaluator e{state.num_evaluators} replaces it {'now' if not delay_s else f'in {delay_s:.0f} s'}"
    draft.reasons.append(reason)
    order_evaluators(draft, evaluator.agent, 1, delay_s, reason)


# -- evaluations -------------------------------------------------------------------------------------


def take_wanted(draft: Draft, worker: Worker, message: EvaluationWanted) -> None:
    """Answer whether an evaluation is taken. A member that asks in place of a lost one gets the same answer."""
    state, number = draft.state, message.number
    known = state.evaluations.get(number)
    if known is not None and known.asker != worker.worker_id:
        _put_evaluation(draft, number, wanted=message, asker=worker.worker_id, evaluator="")
    is_taken = known is not None or (number > state.last_evaluation and _may_take(draft))
    if known is None and is_taken:
        evaluation = Evaluation(wanted=message, asker=worker.worker_id)
        draft.put(evaluations={**state.evaluations, number: evaluation}, last_evaluation=number)
    draft.send(worker.worker_id, EvaluationAnswer(number=number, is_taken=is_taken))


def _may_take(draft: Draft) -> bool:
    state = draft.state
    is_moving = not draft.is_taken() or bool(draft.workers(WorkerState.READY))
    return not is_moving and not state.finishing and not state.stopping and any(_alive(draft))


def _take_done(draft: Draft, evaluator: Evaluator, message: EvaluationDone) -> None:
    known = draft.state.evaluations.get(message.number)
    if known is None or known.evaluator != evaluator.worker_id:
        return
    if message.error:
        draft.reasons.append(
            f"evaluator {evaluator.worker_id} could not do the evaluation of {_place(known)}: {message.error}; the "
            "members compute it"
        )
        _leave_to_members(draft, message.number)
        return
    _put_evaluation(draft, message.number, evaluator="", totals=message.totals)
    _tell_members(draft, message.number)


def take_open(draft: Draft, message: EvaluationsOpen) -> None:
    """Forget the evaluations whose totals all members know."""
    kept = {
        number: each
        for number, each in draft.state.evaluations.items()
        if number in message.numbers or number >= message.below
    }
    if len(kept) < len(draft.state.evaluations):
        draft.put(evaluations=kept)


def settle_evaluations(draft: Draft) -> None:
    """Answer calls of evaluators, and give out what waits for an evaluator; asked after every event."""
    state = draft.state
    if not state.evaluators:
        return
    for evaluator in _alive(draft):
        _answer_call(draft, evaluator)
    for number, each in state.evaluations.items():
        if each.is_over or each.evaluator:
            continue
        asker = draft.state.workers.get(each.asker)
        is_there = asker is not None and asker.state is WorkerState.HOLDING
        free = next((one for one in _alive(draft) if one.stage is _S.FOLLOWING and not _is_busy(draft, one)), None)
        if each.tries >= MOST_TRIES or not is_there or not any(_alive(draft)):
            draft.reasons.append(f"no evaluator does the evaluation of {_place(each)}: the members compute it")
            _leave_to_members(draft, number)
        elif free is not None:
            _put_evaluation(draft, number, evaluator=free.worker_id)
            draft.send(free.worker_id, each.wanted)


def forget_evaluations(draft: Draft) -> None:
    """Forget all evaluations: the run begins again, and counts them anew."""
    draft.put(evaluations={}, last_evaluation=-1)


def holds_joins(state: State) -> bool:
    """Return whether newcomers wait for evaluations whose totals the members do not know."""
    return any(not each.totals for each in state.evaluations.values())


def _answer_call(draft: Draft, evaluator: Evaluator) -> None:
    """Give an evaluator the result of a call before the training, as soon as the workers have decided it."""
    call = evaluator.call
    if call is None or call.number >= len(draft.state.calls):
        return
    known = draft.state.calls[call.number]
    if known.kind != call.kind:
        error = f"the evaluator is at {call.kind}, where the run has called {known.kind}"
        draft.send(evaluator.worker_id, TalkAnswer(number=call.number, error=error))
    elif known.is_decided:
        draft.send(evaluator.worker_id, TalkAnswer(number=call.number, values=list(known.values)))
    else:
        return
    _put(draft, evaluator.worker_id, call=None)


def repeat_news(draft: Draft, worker_id: str) -> None:
    """Tell a worker whose connection is new which evaluations are over: it may have missed that."""
    for number in draft.state.evaluations:
        _tell(draft, [worker_id], number)


def _leave_to_members(draft: Draft, number: int) -> None:
    _put_evaluation(draft, number, evaluator="", is_open=True)
    _tell_members(draft, number)


def _tell_members(draft: Draft, number: int) -> None:
    _tell(draft, [worker.worker_id for worker in draft.workers(WorkerState.ADMITTED, WorkerState.HOLDING)], number)


def _tell(draft: Draft, worker_ids: Iterable[str], number: int) -> None:
    evaluation = draft.state.evaluations[number]
    if evaluation.is_over:
        for worker_id in worker_ids:
            draft.send(worker_id, EvaluationEnded(number=number, totals=evaluation.totals))


def _alive(draft: Draft) -> Iterator[Evaluator]:
    """Yield the evaluators that do evaluations, now or as soon as they have come."""
    for evaluator in draft.state.evaluators.values():
        if evaluator.stage in (_S.ORDERED, _S.STARTING, _S.FOLLOWING):
            yield evaluator


def _is_busy(draft: Draft, evaluator: Evaluator) -> bool:
    return any(each.evaluator == evaluator.worker_id for each in draft.state.evaluations.values())


def _place(evaluation: Evaluation) -> str:
    wanted = evaluation.wanted
    return f"step {wanted.step}" if wanted.step >= 0 else f"the end of training loop {wanted.phases}"


def _put(draft: Draft, worker_id: str, **changes: object) -> Evaluator:
    evaluator = msgspec.structs.replace(draft.state.evaluators[worker_id], **changes)
    draft.put(evaluators={**draft.state.evaluators, worker_id: evaluator})
    return evaluator


def _put_evaluation(draft: Draft, number: int, **changes: object) -> None:
    evaluation = msgspec.structs.replace(draft.state.evaluations[number], **changes)
    draft.put(evaluations={**draft.state.evaluations, number: evaluation})
