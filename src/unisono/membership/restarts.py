"""Consequences of the loss of a worker: its replacement, the dismissal of its machine, or the end of the run."""

from __future__ import annotations

import signal
from typing import Final

from unisono.core.messages import Ended, Failed, Start, StepDone, WorkerExit
from unisono.core.words import position_words, silent_exit_words
from unisono.membership.draft import Draft
from unisono.membership.parts import next_parts, twins_of
from unisono.membership.roster import ALIVE, How, Worker, WorkerState
from unisono.record.problems.kinds import Trouble, kind_or_error

__all__ = [
    "FORGIVE_STEPS",
    "forgive_restarts",
    "lose",
    "note_failure",
    "order",
    "replace_suspects",
    "take_exit",
    "take_failure",
    "turn_agents_away",
]

_S = WorkerState

FORGIVE_STEPS: Final = 100
MAX_DELAY_S: Final = 30.0


def order(
    draft: Draft, agent_id: str, num_workers: int, delay_s: float = 0.0, reason: str = "", *, came: str = ""
) -> None:
    """Order so many new workers from an agent.

    Args:
        came: why they come, in the story of the run; "": the run begins with them.
    """
    first = draft.state.next_number
    ids = [f"w{number}" for number in range(first, first + num_workers)]
    if not ids:
        return
    due = draft.now + delay_s
    parts = next_parts(draft.state, num_workers)
    draft.add_workers(
        {
            i: Worker(worker_id=i, state=_S.ORDERED, agent=agent_id, part=part, heard_at=due, came=came)
            for i, part in zip(ids, parts, strict=True)
        }
    )
    draft.put(next_number=first + num_workers)
    draft.send(agent_id, Start(worker_ids=ids, delay_s=delay_s, reason=reason))


def lose(draft: Draft, worker_id: str, why: str, *, replace: bool = True, how: How = "lost") -> None:
    """Lose a worker for good; the newest generation is broken if the worker belonged to it."""
    worker = draft.state.workers[worker_id]
    if worker_id in draft.state.member_ids or worker_id in draft.holders():
        draft.broken.append(why)
    else:
        draft.reasons.append(why)
    draft.retire(worker_id, _S.LOST, how, why)
    note_failure(draft, worker, why)
    draft.hang_up(worker_id, why)
    if replace:
        _replace(draft, worker)


def _replace(draft: Draft, worker: Worker) -> None:
    state, most = draft.state, draft.state.settings.max_restarts
    if worker.draining or state.finishing or state.stopping:
        return
    if draft.room() <= 0:
        return
    agent = state.agents.get(worker.agent)
    if agent is None or agent.is_sent_away:
        draft.reasons.append("it is not replaced: its agent has ended")
    elif agent.used_restarts >= most:
        where = f"on {agent.host} " if len(state.agents) > 1 else ""
        draft.reasons.append(f"it is not replaced: {where}all {most} restarts are used (--max-restarts)")
    else:
        used = agent.used_restarts
        delay_s = 0.0 if used == 0 else min(MAX_DELAY_S, 2.0 ** (used - 1))
        draft.put_agent(worker.agent, used_restarts=used + 1)
        soon = "now" if delay_s == 0 else f"in {delay_s:.0f} s"
        reason = f"worker w{state.next_number} replaces it {soon} (restart {used + 1} of {most})"
        draft.reasons.append(reason)
        order(draft, worker.agent, 1, delay_s, reason, came=f"replaces {worker.worker_id}")


def forgive_restarts(draft: Draft, message: StepDone) -> None:
    """Give every machine one restart back for every `FORGIVE_STEPS` steps that are done."""
    committed = draft.state.committed
    forgiven = message.step // FORGIVE_STEPS - committed // FORGIVE_STEPS if committed >= 0 else 0
    if forgiven:
        for agent_id, agent in draft.state.agents.items():
            draft.put_agent(agent_id, used_restarts=max(0, agent.used_restarts - forgiven))


# -- ends and errors of workers ----------------------------------------------------------------------


def take_exit(draft: Draft, message: WorkerExit) -> None:
    """Record the end of a worker's process, which an agent has seen."""
    worker = draft.state.workers.get(message.worker_id)
    if worker is None or worker.state not in ALIVE:
        return
    why = f"{worker.name} {silent_exit_words(message.exit_code)}"
    killed = message.exit_code in (-signal.SIGKILL, -signal.SIGTERM)
    is_guest = _is_guest(draft, worker)
    ends_run = draft.state.notice is None and not killed and not is_guest
    _say_exit(draft, worker, message, ends_run=ends_run)
    if ends_run:
        # Nothing has been trained, and most likely another process would fail as well.
        draft.end(False, why, worker.worker_id, message.last_output, message.exit_code)
        return
    may_succeed = (not is_guest or draft.state.held) and _has_served(draft, worker)
    how: How = "failed" if message.exit_code > 0 else "lost"
    lose(draft, worker.worker_id, why, replace=killed or may_succeed, how=how)
    if message.last_output:
        draft.announce_to(worker.agent, f"the last output of {worker.name}:\n{message.last_output}")


def _last_place(draft: Draft, worker: Worker) -> str:
    """Return where a worker was when its process ended. Its last heartbeat may be from an earlier step."""
    beat, step = worker.beat, draft.state.committed + 1
    if worker.state is not _S.HOLDING or step == 0 or (beat is not None and beat.evaluates):
        return worker.where
    return worker.where if beat is not None and beat.step == step else position_words(step, -1)


def _say_exit(draft: Draft, worker: Worker, message: WorkerExit, *, ends_run: bool) -> None:
    draft.alarm(
        Trouble(
            kind="out-of-memory" if message.killed_for else "crash",
            worker_id=worker.worker_id,
            where=_last_place(draft, worker),
            exit_code=message.exit_code,
            place=message.place,
            killed_for=message.killed_for,
            peak_bytes=message.peak_bytes,
            limit_bytes=message.limit_bytes,
            traceback=message.last_output,
            then="the run ends" if ends_run else "",
            ends_run=ends_run,
        )
    )


def _say_failure(draft: Draft, worker: Worker, message: Failed, then: str, *, ends_run: bool = False) -> None:
    draft.alarm(
        Trouble(
            kind=kind_or_error(message.kind),
            worker_id=worker.worker_id,
            step=message.step,
            where=position_words(message.step, message.microbatch, message.samples),
            error=message.error,
            exit_code=message.exit_code,
            traceback=message.traceback,
            detail=message.detail,
            advice=message.advice,
            then=then,
            ends_run=ends_run,
        )
    )


def take_failure(draft: Draft, worker: Worker, message: Failed) -> None:
    """Record an error of a worker's script. Another worker tries a micro-batch once; an error there ends the run."""
    key = (message.step, message.microbatch)
    # Of a loss that is not finite the error says where.
    where = "" if message.kind == "nan" else position_words(message.step, message.microbatch, message.samples)
    what = f"{worker.name} failed{' at ' if where else ''}{where}: {message.error}"
    others = [w for w in draft.workers(_S.HOLDING) if w.worker_id != worker.worker_id]
    before = ""
    if message.retry and worker.state is _S.HOLDING and twins_of(worker, others):
        first = draft.state.tried.get(key)
        if first is None or first[0] == worker.worker_id:
            draft.put(tried={**draft.state.tried, key: (worker.worker_id, message)})
            _say_failure(draft, worker, message, "another worker tries it")
            lose(draft, worker.worker_id, f"{what}; another worker tries it", replace=False, how="failed")
            return
        what += f" (as before on worker {first[0]})"
        before = f"{first[0]} has failed there as well"
    if message.goes_on and others:
        _send_away(draft, worker, message)
        return
    is_new = not message.retry and worker.state in (_S.STARTING, _S.READY, _S.ADMITTED)
    if is_new and ((draft.state.held and others) or _is_guest(draft, worker)):
        # This worker has never been a member: it may lack something (a package, a file) that the members have.
        refused = Trouble(
            kind="failed-join",
            worker_id=worker.worker_id,
            error=message.error,
            traceback=message.traceback,
            then="the others continue",
        )
        draft.alarm(refused)
        may_succeed = draft.state.held and _has_served(draft, worker)
        lose(draft, worker.worker_id, what, replace=may_succeed, how="failed")
        draft.announce_to(worker.agent, message.traceback)
        return
    _say_failure(draft, worker, message, before, ends_run=True)
    draft.end(False, what, worker.worker_id, message.traceback, message.exit_code, sound=message.sound)


def _send_away(draft: Draft, worker: Worker, message: Failed) -> None:
    """Lose a newcomer that computes other values than the members before it: the others go on. It is not replaced:
    another process would compute the same.
    """
    error = message.error.removeprefix("DivergenceError: ").rstrip(".")
    error += f". {worker.warning}" if worker.warning else ""
    first, _, advice = error.partition(". ")
    then = "it is sent away and not replaced, and the others go on"
    draft.alarm(Trouble(kind="failed-join", worker_id=worker.worker_id, error=first, then=then, advice=advice))
    why = f"{worker.name} is sent away and not replaced (`unisono scale` tries another one): {error}"
    lose(draft, worker.worker_id, why, replace=False, how="failed")
    agent = draft.state.agents.get(worker.agent)
    if agent is not None and not agent.primary:
        draft.put_agent(worker.agent, failure=why)
        draft.announce_to(worker.agent, message.traceback)


def replace_suspects(draft: Draft, step: int) -> None:
    """Replace the workers on which micro-batches of a finished step had raised: these have passed on others."""
    passed = {key: value for key, value in draft.state.tried.items() if key[0] <= step}
    if not passed:
        return
    draft.put(tried={key: value for key, value in draft.state.tried.items() if key not in passed})
    for (number, microbatch), (worker_id, failure) in passed.items():
        worker = draft.state.workers[worker_id]
        draft.reasons.append(
            f"{worker.name} is suspect: micro-batch {microbatch} of step {number} raised {failure.error!r} on this "
            "worker, and passed on another one"
        )
        _replace(draft, worker)


# -- machines whose workers all fail -----------------------------------------------------------------


def _is_guest(draft: Draft, worker: Worker) -> bool:
    """Return whether a worker is of a machine that has joined a run whose own command has living workers."""
    agents = draft.state.agents
    primary = [agent_id for agent_id, agent in agents.items() if agent.primary]
    return worker.agent in agents and worker.agent not in primary and bool(draft.workers_of(primary))


def _has_served(draft: Draft, worker: Worker) -> bool:
    """Return whether a failure of this worker is no evidence against its whole machine."""
    agent = draft.state.agents.get(worker.agent)
    return agent is None or agent.primary or agent.has_served


def note_failure(draft: Draft, worker: Worker, why: str) -> None:
    """Remember why a worker could not take part, if none of its machine has taken part yet."""
    if not _has_served(draft, worker):
        draft.put_agent(worker.agent, failure=why)


def turn_agents_away(draft: Draft) -> None:
    """Send away every machine that has joined and none of whose workers could take part."""
    if draft.state.finishing or draft.state.stopping:
        return
    for agent_id, agent in draft.state.agents.items():
        if agent.failure and not agent.is_sent_away and not draft.workers_of([agent_id]):
            why = f"{agent.host} is sent away: none of its workers could take part; the last failure: {agent.failure}"
            draft.put_agent(agent_id, refused=why)
            draft.reasons.append(why)
            draft.send(agent_id, Ended(ok=False, reason=why, exit_code=1))
