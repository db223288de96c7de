"""Health of workers: silence, lateness, hangs, broken exchanges. See `hangs` and `suspicion` for the verdicts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from unisono.core.messages import Beat, Suspect, WriteStacks
from unisono.core.words import listed
from unisono.membership.draft import Draft
from unisono.membership.ending import is_at_end, lose_early_leavers
from unisono.membership.hangs import FIRST_STEP, BegunRound, Hang, Lateness, Limits, Waiting, judge
from unisono.membership.parts import twins_of
from unisono.membership.restarts import lose
from unisono.membership.roster import ALIVE, How, Worker, WorkerState
from unisono.membership.suspicion import MAX_TRIES, Suspicions
from unisono.record.problems.kinds import Trouble

__all__ = ["compare_rounds", "lose_silent_workers", "retry_exchange_when_due", "take_suspect", "watch"]

_S = WorkerState


def lose_silent_workers(draft: Draft) -> None:
    """Lose every worker that has been silent for too long."""
    state = draft.state
    due = [state.workers[worker_id] for worker_id, deadline in state.silent_at().items() if deadline <= draft.now]
    for worker in [*due, *_of_lost_machines(draft, due)]:
        seconds = draft.now - worker.heard_at
        if worker.state is _S.ORDERED:
            why = f"{worker.name} has not connected within {seconds:.0f} s of its start"
        elif worker.closed_at is not None:
            why = f"{worker.name} has closed its connection"
        else:
            why = f"{worker.name} has been silent for {seconds:.1f} s"
            _say_silent(draft, worker, seconds)
        _end_process(draft, worker, why)


def _of_lost_machines(draft: Draft, due: list[Worker]) -> list[Worker]:
    """Return the others whose connection has closed and whose agent is gone, like that of a worker that is lost now.

    Their connections have ended a moment later. One generation without all of them is better than one for each.
    """
    agents, workers = draft.state.agents, draft.state.workers.values()
    gone = {
        worker.agent for worker in due if worker.closed_at is not None and worker.agent and worker.agent not in agents
    }
    if not gone:
        return []
    known = {worker.worker_id for worker in due}
    alive = [worker for worker in workers if worker.state in ALIVE and worker.closed_at is not None]
    return [worker for worker in alive if worker.agent in gone and worker.worker_id not in known]


def _say_silent(draft: Draft, worker: Worker, seconds: float) -> None:
    last = f", last in {worker.where}" if worker.where else ""
    draft.alarm(
        Trouble(
            kind="hang",
            worker_id=worker.worker_id,
            error=(
                f"has sent nothing for {seconds:.1f} s{last}: its process is stopped, native code holds its "
                "interpreter, or its machine cannot be reached"
            ),
            then="it is ended",
            advice="The evidence has the state of its process as the kernel sees it: T is stopped, D waits for a disk "
            "or the network; where it computes (R), native code does not let Python continue",
        )
    )


def _end_process(draft: Draft, worker: Worker, why: str, how: How = "lost") -> None:
    draft.evict(worker, why)
    lose(draft, worker.worker_id, why, how=how)


# -- no progress -------------------------------------------------------------------------------------


def watch(draft: Draft, worker: Worker, beat: Beat) -> None:
    """Judge a worker by its heartbeat, and act if it is late or hangs."""
    limits = draft.state.limits
    if worker.state is _S.ASIDE and beat.seconds_at > limits.hang_s:
        _end_process(draft, worker, f"{worker.name} hangs for {beat.seconds_at:.0f} s and is ended", "evicted")
    if worker.state is not _S.HOLDING:
        return
    if worker.draining and _is_left_behind(draft, worker):
        if beat.seconds_at > limits.hang_s * (FIRST_STEP if beat.num_steps <= 1 else 1):
            why = f"{worker.name}, which was to leave, hangs for {beat.seconds_at:.0f} s and is ended"
            _end_process(draft, worker, why, "evicted")
        return
    if draft.state.hangs:
        draft.put(hangs=tuple(hang for hang in draft.state.hangs if not hang.is_passed(beat)))
    if beat.waiting or beat.seconds_at <= limits.shortest_s:
        return
    known = next((h for h in _hangs_of_others(draft, worker, limits) if h.is_at(beat)), None)
    verdict = judge(beat, _waiting_for(draft, worker), is_known=known is not None, limits=limits)
    _act_on(draft, worker, beat, verdict, known)


def _act_on(draft: Draft, worker: Worker, beat: Beat, verdict: Lateness, known: Hang | None) -> None:
    where = worker.where
    match verdict:
        case Lateness.HANGS_AGAIN:
            assert known is not None
            first = draft.state.workers[known.worker_id].name
            _say_hang(
                draft,
                worker,
                beat,
                f"{known.worker_id} hung there as well, so the script or its data is the cause, and the run ends",
                ends_run=True,
            )
            draft.end(
                False,
                f"{worker.name} hangs: no progress for {beat.seconds_at:.0f} s at {where}, where {first} hung as well "
                f"(for {known.beat.seconds_at:.0f} s). So the cause is the script or its data, not a worker; the "
                "worker's stack is shown above. If the script may take that long there, raise --set kill-after=TIME",
                worker.worker_id,
            )
        case Lateness.HANGS_AT_END:
            draft.alarm(
                Trouble(
                    kind="hang",
                    worker_id=worker.worker_id,
                    error=f"has not reached the end of the run: no progress for {beat.seconds_at:.0f} s",
                    then="the other workers wait there, and the run ends",
                    ends_run=True,
                )
            )
            draft.end(
                False,
                f"{worker.name} has not reached the end of the run: no progress for {beat.seconds_at:.0f} s, and the "
                "other workers wait there; its stack is shown above. If its work after the training loop may take "
                "that long, set --set kill-after=TIME to a tenth of it, or do the work after the `with unisono.Run` "
                "block",
                worker.worker_id,
            )
        case Lateness.HANGS:
            _note_hang(draft, worker, beat)
            _say_hang(draft, worker, beat, "it is ended, and the others continue")
            why = f"{worker.name} hangs: no progress for {beat.seconds_at:.0f} s at {where}"
            _end_process(draft, worker, why, "evicted")
        case Lateness.ASIDE if twins_of(worker, draft.workers(_S.HOLDING)):
            _note_hang(draft, worker, beat)
            _say_hang(draft, worker, beat, "the others compute its micro-batches")
            why = (
                f"{worker.name} makes no progress for {beat.seconds_at:.0f} s at {where} and is left aside: the others "
                "compute its micro-batches"
            )
            draft.retire(worker.worker_id, _S.ASIDE, "evicted", why)
            draft.broken.append(why)
        case Lateness.LATE if worker.late_at != beat.progress:
            draft.put_worker(worker.worker_id, late_at=beat.progress)
            draft.reasons.append(f"{worker.name} is late: no progress for {beat.seconds_at:.1f} s at {where}")
            late = WriteStacks(
                worker_id=worker.worker_id, step=beat.step, microbatch=beat.microbatch, seconds=beat.seconds_at
            )
            draft.send(worker.worker_id, late)


def _say_hang(draft: Draft, worker: Worker, beat: Beat, then: str, *, ends_run: bool = False) -> None:
    draft.alarm(
        Trouble(
            kind="hang",
            worker_id=worker.worker_id,
            where=worker.where,
            seconds=beat.seconds_at,
            then=then,
            ends_run=ends_run,
        )
    )


def _hangs_of_others(draft: Draft, worker: Worker, limits: Limits) -> Iterator[Hang]:
    """Yield the hangs of other workers, earlier and present ones: in a rehearsal two compute one micro-batch."""
    yield from (hang for hang in draft.state.hangs if hang.worker_id != worker.worker_id)
    for other in draft.workers(_S.HOLDING):
        beat = other.beat
        if other.worker_id == worker.worker_id or beat is None or beat.waiting or beat.microbatch < 0:
            continue
        if beat.seconds_at > limits.hang_s:
            yield Hang(worker_id=other.worker_id, beat=beat)


def _waiting_for(draft: Draft, worker: Worker) -> Waiting:
    """Return which workers wait while this one computes."""
    waiting = [w for w in draft.workers(_S.ADMITTED, _S.HOLDING) if w.beat and w.beat.waiting]
    others = [w for w in waiting if w.worker_id != worker.worker_id]
    if members := [w for w in others if w.state is _S.HOLDING]:
        return Waiting.FINISHERS if all(is_at_end(draft, w) for w in members) else Waiting.MEMBERS
    return Waiting.NEWCOMERS if others else Waiting.NOBODY


def _is_left_behind(draft: Draft, worker: Worker) -> bool:
    """Return whether the others have gone on without a worker that holds the run's state, and is to leave."""
    return worker.worker_id not in draft.state.member_ids and worker.worker_id not in draft.holders()


def _note_hang(draft: Draft, worker: Worker, beat: Beat) -> None:
    """Remember the position of a hang in a micro-batch. Between two steps all members may be busy for long."""
    if beat.microbatch < 0:
        return
    draft.put(hangs=(*draft.state.hangs, Hang(worker_id=worker.worker_id, beat=beat)))


# -- broken exchanges --------------------------------------------------------------------------------


def take_suspect(draft: Draft, worker: Worker, message: Suspect) -> None:
    """Record that a member's exchange broke."""
    state = draft.state
    # While no member has entered a planned generation, the broken exchange is that of the generation before.
    is_overtaken = (
        state.notice is not None
        and not state.notice.immediate
        and not draft.has_moved()
        and worker.worker_id in state.before
        and message.generation == worker.generation
    )
    if not is_overtaken and (message.generation != state.generation or worker.worker_id not in state.member_ids):
        return  # the cause is known already
    if message.generation == state.generation and worker.worker_id in state.before:
        draft.put(unreached=True)
    is_first = state.suspected_at is None
    before = state.suspicions.anew() if is_first else state.suspicions
    suspicions = before.reported(worker.worker_id, message.peers, f"{worker.name}: {message.reason}")
    draft.put(suspicions=suspicions, suspicion=suspicions.reason)
    lose_early_leavers(draft, worker, message.peers)
    if is_first:  # announced unless a loss explains it by then
        draft.put(suspected_at=draft.now)


def compare_rounds(draft: Draft, worker: Worker, beat: Beat) -> None:
    """Let the members meet if two of them wait for each other in different rounds: they find out then, and say where.

    Otherwise both would wait until the deadline of their exchange.
    """
    begun, state = BegunRound.of(worker.worker_id, beat), draft.state
    if begun is None or worker.state is not _S.HOLDING or beat.generation != state.generation:
        return
    before = state.begun
    draft.put(begun=begun)
    if before is None or not before.differs_from(beat):
        return
    other = state.workers.get(before.worker_id)
    if other is not None and other.state is _S.HOLDING and before.is_of(other.beat):
        draft.broken.append(f"{worker.name} waits in {begun.title}, and {other.name} in {before.title}")


def retry_exchange_when_due(draft: Draft) -> None:
    """Let the same members try again if no loss has explained a broken exchange in time."""
    state = draft.state
    if state.suspected_at is not None and state.suspected_at + state.policy.suspect_s <= draft.now:
        draft.put(suspected_at=None)
        _retry_exchange(draft)


def _retry_exchange(draft: Draft) -> None:
    """Let the same members try again after a broken exchange without a loss; after several tries one has to go."""
    state = draft.state
    newcomers = [state.workers[i] for i in state.members if i not in state.before]
    if state.unreached and newcomers and all(w.state is _S.ADMITTED for w in newcomers):
        _go_on_without_newcomers(draft, newcomers)
        return
    if _newcomers_waited_in_vain(draft, newcomers):
        # The newcomers have waited for members that are still in a step, which may take long.
        draft.broken.append(f"{state.suspicion}; the members have not reached a step boundary yet: trying again")
        return
    present = [w.worker_id for w in draft.members(_S.ADMITTED, _S.HOLDING)]
    suspicions = state.suspicions.given_up(present)
    draft.put(suspicions=suspicions)
    if suspicions.num_broken < MAX_TRIES or not present:
        draft.broken.append(f"{state.suspicion}; no member was lost: trying again")
        return
    worst, is_guilty = suspicions.worst(present)
    if not is_guilty and (len(present) == 1 or not state.held):
        draft.end(False, f"{MAX_TRIES} exchanges in a row broke, and no single member is to blame: {state.suspicion}")
        return
    name = state.workers[worst].name
    draft.alarm(
        Trouble(
            kind="unreachable",
            worker_id=worst,
            error=f"cannot be reached by the others: {MAX_TRIES} exchanges in a row broke ({state.suspicion})",
            then="it is ended",
        )
    )
    why = f"{name} cannot be reached by the others ({MAX_TRIES} exchanges in a row broke): {state.suspicion}"
    draft.put(suspicions=Suspicions())
    _end_process(draft, state.workers[worst], why)


def _go_on_without_newcomers(draft: Draft, newcomers: list[Worker]) -> None:
    for newcomer in newcomers:
        draft.put_worker(newcomer.worker_id, num_unreached=newcomer.num_unreached + 1)
    draft.put(suspicions=msgspec.structs.replace(draft.state.suspicions, reports={}))
    names = listed([newcomer.worker_id for newcomer in newcomers])
    draft.broken.append(f"{draft.state.suspicion}; the others continue without {names}")


def _newcomers_waited_in_vain(draft: Draft, newcomers: list[Worker]) -> bool:
    state = draft.state
    reporters = state.suspicions.reports.keys() - {newcomer.worker_id for newcomer in newcomers}
    return bool(state.before) and not state.unreached and not draft.has_moved() and not reporters
