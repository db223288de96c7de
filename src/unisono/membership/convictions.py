"""Workers that the others have found to compute wrong values are ended; the run continues without them or goes back."""

from __future__ import annotations

from unisono.core.messages import Convicted
from unisono.core.words import count
from unisono.membership.draft import Draft
from unisono.membership.restarts import lose
from unisono.membership.roster import ALIVE, Worker
from unisono.record.problems.kinds import Trouble

__all__ = ["take_convicted"]


def take_convicted(draft: Draft, worker: Worker, message: Convicted) -> None:
    """End the workers that were found to be wrong, without a replacement: it would compute on the same machine.

    All members that are right report it, so all but the first report say nothing new. A worker that is lost meanwhile
    is named as well, and a run that goes back does so also then: what the worker has computed before is to be doubted.
    """
    if worker.worker_id in message.worker_ids or draft.state.ended is not None:
        return
    wrong = [draft.state.workers[one] for one in message.worker_ids if one in draft.state.workers]
    if not message.goes_back:
        wrong = [one for one in wrong if one.how != "evicted"]  # by the report of another member
    if not wrong:
        return
    first, hosts = message.doubtful_from, tuple(dict.fromkeys(one.host for one in wrong))
    doubtful = f"step {first}" if first == message.step - 1 else f"the steps {first} to {message.step - 1}"
    for one in wrong:
        _say(draft, one, message, doubtful)
        why = f"{one.name}{_where(one)} computes wrong values: {message.what} of step {message.step}"
        if one.state in ALIVE:
            draft.evict(one, why)
            if not message.goes_back:
                lose(draft, one.worker_id, why, replace=False, how="evicted")
        elif not message.goes_back:
            draft.retire(one.worker_id, one.state, "evicted", f"{one.gone}. {why}" if one.gone else why)
    if message.goes_back:
        names = ", ".join(f"{one.name}{_where(one)}" for one in wrong)
        draft.end(
            False,
            f"{names} computes wrong values ({message.what} of step {message.step}), and what it computed in "
            f"{doubtful} is doubtful; the run goes back to a checkpoint of at most {count(message.sound, 'step')}",
            wrong[0].worker_id,
            back_to=message.sound,
            without=hosts,
            sound=message.sound,
        )


def _say(draft: Draft, wrong: Worker, message: Convicted, doubtful: str) -> None:
    times = (
        ", each time that it computed it"
        if message.is_lasting
        else "; the fault is intermittent: not everything it computed after that was wrong"
    )
    if "state" in message.what or wrong.state not in ALIVE:  # is not computed again
        times = ""
    known = "" if message.doubtful_from >= message.step else f". What it computed in {doubtful} is doubtful"
    draft.alarm(
        Trouble(
            kind="corruption",
            worker_id=wrong.worker_id,
            step=message.step,
            error=(
                f"computes wrong values{_device(wrong)}: {message.what} of step {message.step} has different bits "
                f"there than on most workers{times}"
            ),
            then=_then(wrong, message),
            ends_run=message.goes_back,
            advice=f"Test the memory, the processor and the GPU of that machine before it trains again{known}",
        )
    )


def _then(wrong: Worker, message: Convicted) -> str:
    if message.goes_back:
        return "the run goes back to a checkpoint from before that"
    if wrong.state in ALIVE:
        return "it is ended, and the others repeat the step"
    return "it was lost before it could be ended, and the others repeat the step"


def _device(worker: Worker) -> str:
    return f" on device {worker.info.device}" if worker.info is not None else ""


def _where(worker: Worker) -> str:
    return f" on {worker.info.host} ({worker.info.device})" if worker.info is not None else ""
