"""Talking before the training: barriers, values and the order of workers, while no worker has joined yet.

A call is decided by the workers that are alive and have not reached their training loop: a broadcast and a block of
``run.main_first`` by the one that was started first, a barrier and a gather by all of them together. A worker that is
lost is not waited for any more, and its replacement comes to the same call. `settle` is asked after every event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from unisono.core.errors import ProtocolError
from unisono.core.messages import TalkAnswer, TalkCall, TalkDone
from unisono.membership.draft import Draft
from unisono.membership.roster import EarlyCall, Worker, WorkerState

__all__ = ["MAX_BYTES", "settle", "take_talk_call", "take_talk_done"]

_S = WorkerState

MAX_BYTES: Final = 4 << 20
"""Of the values of all calls of a run together: they are a part of every version of the head's state."""


def take_talk_call(draft: Draft, worker: Worker, message: TalkCall) -> None:
    """Record that a worker has come to a call, and waits for its result.

    Raises:
        ProtocolError: the worker leaves out a call.
    """
    calls, number = draft.state.calls, message.number
    if not 0 <= number <= len(calls):
        raise ProtocolError(f"{worker.name} makes call {number} but has the results of {len(calls)}")
    if number == len(calls):
        draft.put(calls=(*calls, EarlyCall(kind=message.kind)))
    call = draft.state.calls[number]
    if call.kind != message.kind:
        _refuse(
            draft,
            number,
            [worker.worker_id],
            f"{_ordinal(number)} call before run.steps is {message.kind} on {worker.name}, but was {call.kind} on "
            "another worker",
        )
    elif call.is_decided:
        draft.send(worker.worker_id, TalkAnswer(number=number, values=list(call.values)))
    elif call.first == worker.worker_id:
        draft.send(worker.worker_id, TalkAnswer(number=number, is_first=True))  # the first one was lost
    elif _num_bytes(draft.state.calls) + len(message.value) > MAX_BYTES:
        _refuse(
            draft,
            number,
            [worker.worker_id],
            "the values that were given to run.broadcast and run.all_gather before run.steps have more than "
            f"{MAX_BYTES:,} bytes together: write large data to a file, or make the call after the first step of "
            "run.steps",
            alike=False,
        )
    else:
        _put(draft, number, came={**call.came, worker.worker_id: message.value})


def take_talk_done(draft: Draft, worker: Worker, message: TalkDone) -> None:
    """Record that a worker has run its block of ``run.main_first`` before the others."""
    calls, number = draft.state.calls, message.number
    if number >= len(calls) or calls[number].is_decided or calls[number].first != worker.worker_id:
        return
    if message.ok:
        _decide(draft, number)
    else:
        _put(draft, number, first="", failed=(*calls[number].failed, worker.worker_id))


def settle(draft: Draft) -> None:
    """Decide the calls that can be decided now."""
    for number, call in enumerate(draft.state.calls):
        if not call.is_decided:
            _settle(draft, number)


def _settle(draft: Draft, number: int) -> None:
    call, workers = draft.state.calls[number], draft.state.workers
    gone = [i for i in call.came if workers[i].state in (_S.LOST, _S.LEFT)]
    if gone:
        came = {worker_id: value for worker_id, value in call.came.items() if worker_id not in gone}
        call = _put(draft, number, came=came)
    waiting = [i for i in call.came if workers[i].state is _S.STARTING and i not in (call.first, *call.failed)]
    if not waiting and not call.first:
        return
    if waiting and (passed := _without_the_call(draft, call)):
        _refuse(
            draft,
            number,
            waiting,
            f"{passed.name} reached the training loop, or its end, without {_ordinal(number)} call before run.steps, "
            f"{call.kind}",
        )
        return
    open_ = [w for w in draft.workers(_S.ORDERED, _S.STARTING) if w.worker_id not in call.failed]
    if call.kind == "run.main_first":
        _choose_first(draft, number, open_)
    elif call.kind == "run.broadcast":
        if open_[0].worker_id in call.came:
            _decide(draft, number, [call.came[open_[0].worker_id]])
    elif all(w.worker_id in call.came for w in open_) and len(open_) >= draft.state.policy.least:
        _decide(draft, number, [call.came[w.worker_id] for w in open_] if call.kind == "run.all_gather" else [])


def _without_the_call(draft: Draft, call: EarlyCall) -> Worker | None:
    """Return a worker that is past the calls before the training and has not made this one: it never will."""
    past = draft.workers(_S.READY, _S.ADMITTED, _S.HOLDING, _S.ASIDE, _S.FINISHED)
    return next((worker for worker in past if worker.worker_id not in call.came), None)


def _choose_first(draft: Draft, number: int, open_: list[Worker]) -> None:
    """Let the worker that was started first run its block, unless another one does."""
    call = draft.state.calls[number]
    ids = [worker.worker_id for worker in open_]
    if call.first not in ids:
        call = _put(draft, number, first="")
    if not call.first and ids and ids[0] in call.came:
        _put(draft, number, first=ids[0])
        draft.send(ids[0], TalkAnswer(number=number, is_first=True))


def _decide(draft: Draft, number: int, values: Iterable[bytes] = ()) -> None:
    """Give the result to all workers that wait for it."""
    call = draft.state.calls[number]
    found = _put(draft, number, is_decided=True, values=tuple(values), came={}, first="", failed=())
    for worker_id in call.came:
        if worker_id not in (call.first, *call.failed):
            draft.send(worker_id, TalkAnswer(number=number, values=list(found.values)))


def _refuse(draft: Draft, number: int, worker_ids: Iterable[str], why: str, *, alike: bool = True) -> None:
    """Answer with an error, which ends the scripts of these workers."""
    refused = list(worker_ids)
    help_ = (
        ". All workers must call run.barrier, run.broadcast, run.all_gather and run.main_first alike, whatever "
        "run.rank, the time or a file says"
    )
    for worker_id in refused:
        draft.send(worker_id, TalkAnswer(number=number, error=why + help_ * alike))
    came = draft.state.calls[number].came
    _put(draft, number, came={i: value for i, value in came.items() if i not in refused})


def _put(draft: Draft, number: int, **changes: Any) -> EarlyCall:
    calls = draft.state.calls
    call = msgspec.structs.replace(calls[number], **changes)
    draft.put(calls=(*calls[:number], call, *calls[number + 1 :]))
    return call


def _num_bytes(calls: Iterable[EarlyCall]) -> int:
    return sum(len(value) for call in calls for value in (*call.values, *call.came.values()))


def _ordinal(number: int) -> str:
    names = ("the first", "the second", "the third")
    return names[number] if number < len(names) else f"the {number + 1}th"
