"""Draft of the table's next state during one event, and of the messages to send."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unisono.core.messages import Ended, Evict, Message, UserSentence
from unisono.membership.parts import room_beside
from unisono.membership.roster import ALIVE, GONE, Agent, How, State, Worker, WorkerState, number_of
from unisono.record.problems.kinds import Trouble

__all__ = ["Action", "Alarm", "Draft", "Hangup", "Invite", "Send"]

_S = WorkerState
_STATE = operator.attrgetter("state")


class Send(msgspec.Struct, frozen=True):
    """Send this message to this worker or agent."""

    to: str
    message: Message


class Hangup(msgspec.Struct, frozen=True):
    """Close this worker's connection for good."""

    worker_id: str
    reason: str


class Invite(msgspec.Struct, frozen=True):
    """Say on all machines how another machine joins: the run waits for more workers."""


class Alarm(msgspec.Struct, frozen=True):
    """Say what has gone wrong, and keep the evidence."""

    trouble: Trouble


Action = Send | Hangup | Invite | Alarm


@dataclass
class Draft:
    """One call of `unisono.membership.step`."""

    state: State
    now: float
    actions: list[Action] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Reasons why the newest generation cannot go on."""
    drained: list[str] = field(default_factory=list)
    """Workers that were asked to leave, until a generation without them is announced."""
    touched: set[str] = field(default_factory=set)
    """Workers and agents that are another value than before, or new: only these are looked at for what has happened."""

    # -- changes -------------------------------------------------------------------------------------

    def put(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def put_worker(self, worker_id: str, **changes: Any) -> Worker:
        self.put_workers([worker_id], **changes)
        return self.state.workers[worker_id]

    def put_workers(self, worker_ids: Iterable[str], **changes: Any) -> None:
        """Make the same changes to several workers."""
        known = self.state.workers
        changed = {worker_id: msgspec.structs.replace(known[worker_id], **changes) for worker_id in worker_ids}
        if changed:
            self.add_workers(changed)

    def add_workers(self, workers: Mapping[str, Worker]) -> None:
        """Put these workers into the state, new or in the place of what was known of them."""
        self.touched.update(workers)
        self.put(workers={**self.state.workers, **workers})

    def retire(self, worker_id: str, state: WorkerState, how: How, why: str) -> None:
        """Note that a worker is no member any more, and will not be one."""
        self.put_worker(worker_id, state=state, how=how, gone=why)

    def put_agent(self, agent_id: str, **changes: Any) -> Agent:
        agent = msgspec.structs.replace(self.state.agents[agent_id], **changes)
        self.put(agents={**self.state.agents, agent_id: agent})
        return agent

    def send(self, to: str, message: Message) -> None:
        self.actions.append(Send(to, message))

    def hang_up(self, worker_id: str, reason: str) -> None:
        self.actions.append(Hangup(worker_id, reason))

    def invite(self) -> None:
        self.actions.append(Invite())

    def alarm(self, trouble: Trouble) -> None:
        """Say what has gone wrong, before what follows from it."""
        worker = self.state.workers.get(trouble.worker_id)
        host = (worker.host if worker is not None else "") or trouble.host
        step = trouble.step if trouble.step >= 0 or not self.state.held else self.state.committed + 1
        self.actions.append(Alarm(msgspec.structs.replace(trouble, host=host, step=step)))

    def announce_to(self, agent_id: str, text: str) -> None:
        """Show this on the terminal of one machine."""
        if agent_id in self.state.agents:
            self.send(agent_id, UserSentence(text=text))

    def evict(self, worker: Worker, reason: str) -> None:
        """Let the worker's agent end its process."""
        if worker.agent in self.state.agents:
            self.send(worker.agent, Evict(worker_id=worker.worker_id, reason=reason))

    def dismiss(self, worker: Worker, reason: str) -> None:
        """Send away a worker that is not needed and does not hold the run's state."""
        self.retire(worker.worker_id, _S.LEFT, "left", reason)
        if worker.state is not _S.ORDERED:
            self.send(worker.worker_id, Ended(ok=True, reason=reason))
        self.evict(worker, reason)

    def end(
        self,
        ok: bool,
        reason: str,
        worker_id: str = "",
        traceback: str = "",
        exit_code: int = 1,
        *,
        back_to: int = -1,
        without: Sequence[str] = (),
        sound: int = -1,
    ) -> None:
        """End the run. With ``back_to`` and ``without`` the command starts it again (`unisono.core.messages.Ended`)."""
        ended = Ended(
            ok=ok,
            reason=reason,
            worker_id=worker_id,
            traceback=traceback,
            exit_code=0 if ok else max(exit_code, 1),
            step=self.state.committed,
            back_to=back_to,
            without=list(without),
            sound=sound,
        )
        self.put(ended=ended)
        self.reasons.append(reason)
        for worker in self.state.workers.values():
            if worker.state in ALIVE - {_S.ORDERED} or worker.state is _S.FINISHED:
                self.send(worker.worker_id, ended)
        for agent_id in self.state.agents:
            self.send(agent_id, ended)

    # -- questions -----------------------------------------------------------------------------------

    def workers(self, *states: WorkerState) -> list[Worker]:
        """Return the workers in these states, in the order in which they were started."""
        found = [w for w in self.state.workers.values() if w.state in states]
        found.sort(key=_start)
        return found

    def staying(self) -> list[Worker]:
        """Return the living workers that were not asked to leave, in the order in which they were started."""
        return [w for w in self.workers(*ALIVE) if not w.draining]

    def room(self) -> int:
        """Return how many more workers there may be than those that stay; negative: there are too many."""
        return room_beside(self.staying(), self.state.policy)

    def num_workers(self, *states: WorkerState) -> int:
        """Return the number of workers in these states."""
        counts = Counter(map(_STATE, self.state.workers.values()))
        return sum(counts[state] for state in states)

    def members(self, *states: WorkerState) -> list[Worker]:
        """Return the workers in these states that belong to the newest generation."""
        members = self.state.member_ids
        return [w for w in self.workers(*states) if w.worker_id in members]

    def holders(self) -> list[str]:
        """Return the workers that could go on if the newest generation broke now (see the package's docstring)."""
        pool = self.state.member_ids
        if self.state.before and not self.has_moved():
            pool = pool.union(self.state.before)
        return [w.worker_id for w in self.workers(_S.HOLDING) if w.worker_id in pool]

    def has_moved(self) -> bool:
        """Return whether a member has taken the newest generation."""
        state = self.state
        generation, workers = state.generation, state.workers
        return any(workers[m].generation == generation for m in state.members)

    def is_taken(self) -> bool:
        """Return whether all members have taken the newest generation."""
        generation, workers = self.state.generation, self.state.workers
        for worker_id in self.state.members:
            worker = workers[worker_id]
            has_taken = worker.state is _S.HOLDING and worker.generation == generation
            if not has_taken and worker.state not in GONE:
                return False
        return True

    def workers_of(self, agents: Iterable[str]) -> list[Worker]:
        """Return the living workers of these agents."""
        chosen = set(agents)
        return [w for w in self.workers(*ALIVE) if w.agent in chosen]


def _start(worker: Worker) -> int:
    """Return the position of a worker in the order in which workers were started."""
    return number_of(worker.worker_id)
