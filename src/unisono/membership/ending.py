"""End of the training: of all workers together, or of one alone while the others continue."""

from __future__ import annotations

from collections.abc import Collection

from unisono.core.messages import Beat, Finished, Leaving
from unisono.core.words import ALONE_ADVICE
from unisono.membership.draft import Draft
from unisono.membership.restarts import lose
from unisono.membership.roster import ALIVE, Worker, WorkerState
from unisono.record.problems.kinds import Trouble

__all__ = [
    "compare_leavings",
    "dismiss_newcomers",
    "finish",
    "forget_leavings",
    "has_come_to_an_end",
    "is_at_end",
    "lose_early_leavers",
    "take_finished",
    "take_leaving",
]

_S = WorkerState


def take_leaving(draft: Draft, worker: Worker, message: Leaving) -> None:
    """Record that a worker has left a training loop."""
    draft.put(leaving={**draft.state.leaving, worker.worker_id: message})
    for other in draft.workers(_S.HOLDING):
        if other.beat is not None:
            compare_leavings(draft, other, other.beat)


def take_finished(draft: Draft, worker: Worker, message: Finished) -> None:
    """Record that a script has returned. After the first member that finishes no newcomer is admitted.

    A member that has left the training loop before its end does not count, as long as others may go on.
    """
    leaving = {i: left for i, left in draft.state.leaving.items() if i != worker.worker_id}
    if message.step >= 0:
        leaving[worker.worker_id] = Leaving(phase=message.phase, step=message.step)
    draft.put(leaving=leaving)
    state = draft.state
    if message.trained_alone:
        _say_trained_alone(draft, worker, message.trained_alone)
    if worker.worker_id not in {*state.members, *state.before} or not state.held:
        return
    members = [w for w in draft.workers(_S.HOLDING) if w.worker_id in {*state.members, *state.before}]
    if message.step >= 0 and members:
        for other in members:
            if (peers := state.suspicions.reports.get(other.worker_id)) is not None:
                lose_early_leavers(draft, other, peers)
        return
    draft.put(finishing=True)


def _say_trained_alone(draft: Draft, worker: Worker, what: str) -> None:
    """Say that a script has trained outside of the run; with several workers the run has failed."""
    number = len(draft.workers(*ALIVE, _S.FINISHED))
    if number > 1:
        draft.end(
            False, f"{what}: each of the {number} workers has trained by itself. {ALONE_ADVICE}", worker.worker_id
        )
    else:
        draft.announce_to(worker.agent, f"{what}. {ALONE_ADVICE}")


def is_at_end(draft: Draft, worker: Worker) -> bool:
    """Return whether a worker has come to the end of its ``with unisono.Run(...)``."""
    left = draft.state.leaving.get(worker.worker_id)
    return left is not None and not left.goes_on


# -- one worker leaves the training loop, and the others do not --------------------------------------


def compare_leavings(draft: Draft, worker: Worker, beat: Beat) -> None:
    """End the run if a member is in a step that another member has left the training loop before."""
    if not draft.state.leaving or worker.state is not _S.HOLDING or beat.evaluates or draft.state.ended is not None:
        return
    for worker_id, left in draft.state.leaving.items():
        other = draft.state.workers[worker_id]
        is_beyond = beat.step >= left.step if beat.phase == left.phase else beat.phase > left.phase
        if worker_id == worker.worker_id or not is_beyond or (left.goes_on and beat.phase != left.phase):
            continue
        if other.state is _S.FINISHED or (other.state is _S.HOLDING and left.exits):
            lose_early_leavers(draft, worker, [worker_id])
        elif other.state is _S.HOLDING:
            begun = f"step {beat.step}" + ("" if beat.phase == left.phase else " of another run.steps")
            draft.alarm(
                Trouble(
                    kind="divergence",
                    worker_id=worker_id,
                    error=(
                        f"{worker_id} left the training loop before step {left.step}, but {worker.worker_id} has "
                        f"begun {begun}"
                    ),
                    ends_run=True,
                    advice="Decide by step.loss or the totals of run.evaluate, which are the same on all workers, and "
                    "not by run.rank, the time, or a number that was summed within `for batch in step`",
                )
            )
            draft.end(
                False,
                f"{other.name} left the training loop before step {left.step} (by a break or a return that only it "
                f"reached?), but {worker.name} has begun {begun}. All workers must leave the loop at the same step: "
                "decide by step.loss or the totals of run.evaluate, which are the same on all workers, and not by "
                "run.rank, the time, or a number that was summed within `for batch in step`",
                worker_id,
            )
            return


def lose_early_leavers(draft: Draft, worker: Worker, missed: Collection[str]) -> None:
    """Lose the workers whose script has ended in the middle of the training, which a member goes on with.

    Args:
        missed: the workers that the member waits for; empty: the member does not know.
    """
    if is_at_end(draft, worker):
        return
    for worker_id, left in draft.state.leaving.items():
        other = draft.state.workers[worker_id]
        has_exited = other.state is _S.FINISHED or (other.state is _S.HOLDING and left.exits)
        if has_exited and (not missed or worker_id in missed):
            lose(
                draft,
                worker_id,
                f"{other.name} left the training loop at step {left.step - 1} and ended with exit code 0 (by "
                f"sys.exit, or the end of its script), but {worker.name} did not",
            )


def forget_leavings(draft: Draft) -> None:
    """Forget the reports about a loop that all members have left, and those of lost workers.

    The report of a worker that was lost at the end of its run still shows that another one has not ended there alone.
    """
    state = draft.state
    if not state.leaving:
        return
    beats = [worker.beat for worker in draft.workers(_S.HOLDING)]
    finished = {(p.phase, p.step) for i, p in state.leaving.items() if state.workers[i].state is _S.FINISHED}

    def counts(worker_id: str, left: Leaving) -> bool:
        if left.goes_on and all(beat is not None and beat.phase > left.phase for beat in beats):
            return False
        is_gone = state.workers[worker_id].state in (_S.LOST, _S.LEFT)
        return not is_gone or (not left.goes_on and (left.phase, left.step) in finished)

    kept = {worker_id: left for worker_id, left in state.leaving.items() if counts(worker_id, left)}
    if len(kept) < len(state.leaving):
        draft.put(leaving=kept)


# -- the end of the run ------------------------------------------------------------------------------


def has_come_to_an_end(draft: Draft) -> bool:
    """Return whether more than one worker has ended the training at the same step, or the only member has."""
    state = draft.state
    for worker in draft.workers(_S.FINISHED):
        left = state.leaving.get(worker.worker_id)
        if left is None:
            continue
        others = [other for i, other in state.leaving.items() if i != worker.worker_id and not other.goes_on]
        is_alone = (worker.worker_id,) in (state.members, state.before)
        if is_alone or any((left.phase, left.step) == (other.phase, other.step) for other in others):
            return True
    return False


def dismiss_newcomers(draft: Draft) -> None:
    """Dismiss the workers that are not members yet: the first member has finished the training."""
    late = draft.workers(_S.ORDERED, _S.STARTING, _S.READY)
    if not draft.has_moved():
        late += [w for w in draft.workers(_S.ADMITTED) if w.worker_id not in draft.state.before]
    for newcomer in late:
        draft.dismiss(newcomer, "the run has finished its training")


def finish(draft: Draft) -> bool:
    """End the run if no worker has anything left to do; return whether the run has ended."""
    state = draft.state
    is_alive = any(worker.state in ALIVE for worker in state.workers.values())
    if state.stopping and not (state.held and draft.workers(_S.HOLDING)):
        draft.end(True, state.stopping)
    elif is_alive:
        return False
    elif draft.workers(_S.FINISHED):
        draft.end(True, "finished")
    elif state.held and not state.members:
        draft.end(True, "all workers have left")
    elif state.workers:
        draft.end(False, f"no worker is left: {'; '.join(draft.reasons) or 'all have gone'}")
        draft.reasons = draft.reasons[-1:]
    return draft.state.ended is not None
