"""Announcement of the next generation: at once after a loss, else when all members are ready for it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unisono.core.messages import MemberInfo, Notice
from unisono.core.words import count, listed
from unisono.membership.agents import drain_withdrawn
from unisono.membership.draft import Draft
from unisono.membership.elasticity import free_machines, tell_wanted
from unisono.membership.ending import dismiss_newcomers, finish, has_come_to_an_end
from unisono.membership.heirs import is_cut_off
from unisono.membership.hellos import MAX_UNREACHED, send_away
from unisono.membership.parts import bare_parts, to_admit
from unisono.membership.restarts import turn_agents_away
from unisono.membership.roster import Worker, WorkerState, number_of
from unisono.membership.talk_rules import settle

__all__ = ["follow_up"]

_S = WorkerState


def follow_up(draft: Draft) -> None:
    """Announce what the new state needs: a generation, or the end of the run."""
    if draft.state.ended is None and draft.broken:
        _go_on_without_the_lost(draft)
    if draft.state.ended is None:
        drain_withdrawn(draft)
    if draft.state.ended is None and draft.state.finishing:
        dismiss_newcomers(draft)
    if draft.state.ended is None and not finish(draft):
        _plan(draft)
    if draft.state.ended is None:
        settle(draft)
        turn_agents_away(draft)
        free_machines(draft)
        tell_wanted(draft)
    if draft.state.ended is None and draft.drained:
        draft.reasons.append(f"{listed(draft.drained)} will leave")


# -- after a loss ------------------------------------------------------------------------------------


def _go_on_without_the_lost(draft: Draft) -> None:
    """Announce a generation of the survivors, or end the run if they cannot go on: the newest generation is broken."""
    why = "; ".join(dict.fromkeys(draft.broken))
    survivors = draft.holders()
    fresh = draft.members(_S.ADMITTED)
    if _state_is_lost(draft, survivors, fresh):
        _go_on_without_state(draft, why)
        return
    if not survivors:
        _announce(draft, [newcomer.worker_id for newcomer in fresh], why, immediate=True)
        return
    for newcomer in fresh:
        draft.put_worker(newcomer.worker_id, state=_S.READY)
        if newcomer.draining:  # asked to leave before it had taken its generation
            draft.dismiss(newcomer, "drained before it was admitted")
        elif newcomer.num_unreached >= MAX_UNREACHED:
            send_away(draft, newcomer)
    _announce(draft, survivors, why, immediate=True)


def _state_is_lost(draft: Draft, survivors: list[str], fresh: list[Worker]) -> bool:
    """Return whether the survivors do not hold the run's state, and the newcomers of the generation cannot make it.

    Before the first step is done nothing is lost with the state: the newcomers begin (again).
    """
    state = draft.state
    can_begin = bool(fresh) and state.committed < 0
    holds = {*state.members, *state.before}.intersection(survivors)
    return state.held and (not holds or bool(_lost_parts(draft, holds))) and not can_begin


def _lost_parts(draft: Draft, survivors: Iterable[str]) -> list[int]:
    """Return the parts of the model that none of the survivors carries."""
    return bare_parts([draft.state.workers[worker_id] for worker_id in survivors], draft.state.policy.parts)


def _go_on_without_state(draft: Draft, why: str) -> None:
    """End the run, or begin again if no step was done: no worker is left that holds the run's state."""
    state = draft.state
    if state.stopping:
        return
    if state.finishing or has_come_to_an_end(draft):
        draft.put(finishing=True)
        for newcomer in draft.workers(_S.ADMITTED):
            draft.dismiss(newcomer, "the run has finished its training")
        return
    if state.committed < 0 and any(not w.draining for w in draft.workers(_S.ORDERED, _S.STARTING, _S.READY)):
        draft.put(held=False)
        _announce(draft, [], f"{why}; no step was done, so the run starts again", immediate=True)
        return
    lost = _lost_parts(draft, draft.holders())
    of_part = f" of part {lost[0]} of the model" if 0 < len(lost) < state.policy.parts else ""
    draft.end(False, f"{why}; no worker with the run's state{of_part} is left")


# -- planned -----------------------------------------------------------------------------------------


def _plan(draft: Draft) -> None:
    """Announce a planned generation, if there is reason and all members have taken the one before."""
    state = draft.state
    if state.finishing or not draft.is_taken():
        return
    if not state.held and not state.members:
        _plan_first(draft)
    elif not state.stopping:
        _plan_next(draft)
    elif state.members:
        _announce(draft, [], state.stopping, immediate=False)


def _ready(draft: Draft) -> list[Worker]:
    """Return the workers to admit. Machines that may be unreachable are admitted one at a time."""
    waiting = draft.workers(_S.READY)
    doubted = [w.info.host for w in waiting if w.num_unreached and w.info]
    if doubted:
        waiting = [w for w in waiting if w.info and w.info.host == doubted[0]]
    return waiting


def _plan_first(draft: Draft) -> None:
    policy = draft.state.policy
    num_here = draft.num_workers(_S.READY, _S.FINISHED)
    # Workers that will not come any more are not waited for.
    are_coming = draft.num_workers(_S.ORDERED, _S.STARTING) > 0 or draft.state.num_coming > 0
    ready = _ready(draft) if num_here >= policy.begins_with or not are_coming else []
    is_complete = len(ready) + draft.num_workers(_S.FINISHED) >= policy.begins_with
    bare = bare_parts(ready, policy.parts)
    if ready and not bare and (is_complete or (not are_coming and len(ready) >= policy.least)):
        first = to_admit([], ready, policy)
        _announce(draft, [worker.worker_id for worker in first], "all are ready", immediate=False)
    elif policy.wait_for:
        _say_that_the_run_waits(draft)
    elif ready and bare and len(ready) != draft.state.waits_with:
        draft.put(waits_with=len(ready))
        draft.reasons.append(f"{_without(bare, policy.parts)}, so the run waits for a machine that joins")
        draft.invite()


def _say_that_the_run_waits(draft: Draft) -> None:
    """Say how many workers are there and how many are waited for, when all that were ordered have come."""
    state = draft.state
    in_calls = {worker_id for call in state.calls if not call.is_decided for worker_id in call.came}
    there = [w for w in draft.workers(_S.STARTING, _S.READY) if w.state is _S.READY or w.worker_id in in_calls]
    are_coming = len(there) < len(draft.workers(_S.ORDERED, _S.STARTING, _S.READY))
    wanted = state.policy.wait_for
    if are_coming or len(there) == state.waits_with or not len(there) < wanted or state.stopping:
        return
    draft.put(waits_with=len(there))
    draft.reasons.append(f"{len(there)} of {count(wanted, 'worker')} are there; the run starts when all {wanted} are")
    draft.invite()


def _plan_next(draft: Draft) -> None:
    state, policy = draft.state, draft.state.policy
    holding = draft.workers(_S.HOLDING)
    staying = [w for w in holding if not w.draining]
    admitted = to_admit(staying, _ready(draft), policy)
    coming = {w.part for w in draft.workers(_S.ORDERED, _S.STARTING, _S.READY)}
    taken_over = coming.intersection(bare_parts(staying, policy.parts))
    staying += [w for w in holding if w.draining and w.part in taken_over]  # until a newcomer has the state
    wanted = [w.worker_id for w in (*staying, *admitted)]
    joins = [i for i in wanted if i not in state.member_ids]
    going_on = set(wanted)
    leaves = [i for i in state.members if i not in going_on and state.workers[i].state is _S.HOLDING]
    is_alone = is_cut_off(state)
    is_whole = not bare_parts((*staying, *admitted), policy.parts)
    is_enough = len(wanted) >= policy.minimum and is_whole and not is_alone
    is_paused = state.notice is not None and state.notice.paused
    if leaves or (is_enough and (joins or is_paused)) or (is_alone and not is_paused):
        words = [f"{listed(joins)} {'joins' if len(joins) == 1 else 'join'}"] if joins else []
        words += [f"{listed(leaves)} {'leaves' if len(leaves) == 1 else 'leave'}"] if leaves else []
        draft.drained = [i for i in draft.drained if i not in leaves]
        back = "other machines are out of reach" if is_alone else "there are enough workers again"
        _announce(draft, wanted, ", ".join(words) or back, immediate=False)


# -- the notice --------------------------------------------------------------------------------------


def _announce(draft: Draft, worker_ids: Iterable[str], why: str, *, immediate: bool) -> None:
    """Make the next generation and tell all workers that it concerns."""
    state = draft.state
    infos = _by_rank(_info_of(state.workers[i]) for i in worker_ids)
    is_alone = is_cut_off(state)
    bare = bare_parts((state.workers[info.worker_id] for info in infos), state.policy.parts)
    is_paused = bool(infos) and (is_alone or bool(bare) or len(infos) < state.policy.minimum)
    generation = max(state.generation, state.unknown) + 1
    if is_paused and is_alone:
        machines = count(len(state.agents), "machine")
        reason = f"{why}; paused: {machines} so there is no majority (--set when-cut=majority)"
    elif is_paused and bare:
        reason = f"{why}; paused: {_without(bare, state.policy.parts)}"
    elif is_paused:
        reason = f"{why}; paused: {len(infos)} of at least {count(state.policy.minimum, 'worker')}"
    elif not infos:
        reason = why
    else:
        reason = f"{why}; generation {generation} with {count(len(infos), 'worker')}"
    new = [state.workers[info.worker_id] for info in infos if info.worker_id not in state.member_ids]
    notice = Notice(
        generation=generation,
        members=infos,
        immediate=immediate,
        paused=is_paused,
        reason=reason,
        warnings=[worker.warning for worker in new if worker.warning],
    )
    concerned = {*state.member_ids, *state.before, *(info.worker_id for info in infos)}
    draft.put(
        notice=notice,
        before=() if immediate else state.members,
        suspected_at=None,
        suspicions=msgspec.structs.replace(state.suspicions, reports={}),
        unreached=False,
    )
    ready = [info.worker_id for info in infos if state.workers[info.worker_id].state is _S.READY]
    draft.put_workers(ready, state=_S.ADMITTED)
    if not any(known.startswith(reason) for known in draft.reasons):
        # A loss is named before its consequence, and a request before its result.
        draft.reasons.insert(0 if immediate else len(draft.reasons), reason)
    for worker_id in sorted(concerned, key=number_of):
        if state.workers[worker_id].state in (_S.READY, _S.ADMITTED, _S.HOLDING, _S.ASIDE):
            draft.send(worker_id, notice)


def _without(bare: list[int], num_parts: int) -> str:
    parts = "part" if len(bare) == 1 else "parts"
    return f"no worker has {parts} {listed([str(part) for part in bare])} of {num_parts}"


def _info_of(worker: Worker) -> MemberInfo | None:
    """Return what the others are told of a worker: what it says of itself, and the part that it was given."""
    if worker.info is None or worker.info.part == worker.part:
        return worker.info
    return msgspec.structs.replace(worker.info, part=worker.part)


def _by_rank(found: Iterable[MemberInfo | None]) -> list[MemberInfo]:
    """Return members in the order of their ranks: those of one host together, else by their worker numbers."""
    infos = sorted((info for info in found if info is not None), key=lambda info: number_of(info.worker_id))
    hosts: dict[str, int] = {}
    for info in infos:
        hosts.setdefault(info.host, len(hosts))
    return sorted(infos, key=lambda info: hosts[info.host])
