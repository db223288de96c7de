"""The state of the membership table: settings, workers, machines, the newest generation.

A worker goes through::

    ORDERED --Hello--> STARTING --Ready--> READY --notice--> ADMITTED --Holding--> HOLDING --Finished--> FINISHED
                                             ^                   |                    |
                                             +--loss of another--+                    +--Left--> LEFT, or LOST
                                                                                      +--hangs-> ASIDE -> LOST

`unisono.membership` has the rules.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Collection, Mapping
from typing import Final, Literal

import msgspec

from unisono.core.efficiency import Measured
from unisono.core.messages import Beat, Ended, Failed, Leaving, MemberInfo, Notice
from unisono.core.policy import Policy
from unisono.core.settings import DEFAULTS, RunSettings
from unisono.core.words import position_words
from unisono.membership.hangs import BegunRound, Hang, Limits
from unisono.membership.suspicion import Suspicions

__all__ = [
    "ALIVE",
    "GONE",
    "START_HANGS",
    "Agent",
    "EarlyCall",
    "How",
    "State",
    "Worker",
    "WorkerState",
    "excused",
    "noted",
    "number_of",
    "rebranched",
    "resumed",
    "seat_of",
]

KEPT_BRANCHES: Final = 100
"""So many branches back a machine may come back to with its workers."""
START_HANGS: Final = 10
"""So many times `RunSettings.hang_s` may pass from the start of a process to its hello: it may load over a network."""


class WorkerState(enum.Enum):
    """The stages of a worker's life; the value is what the user reads."""

    ORDERED = "ordered"
    """An agent has the order to start it."""
    STARTING = "starting"
    """It is connected and runs the script up to the training loop."""
    READY = "ready"
    """It waits to be admitted."""
    ADMITTED = "admitted"
    """It is in the newest generation and does not hold the run's state yet."""
    HOLDING = "training"
    """It holds the run's state: it can go on when others are lost."""
    ASIDE = "aside"
    """It makes no progress, so the others continue without it. If it wakes up, it ends, and another one joins."""
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"

    __hash__ = object.__hash__  # a set of states is asked for every worker: that of Enum is a function of Python


How = Literal["left", "lost", "failed", "evicted", "finished"]
"""Ways in which a worker goes; see `unisono.core.events.WorkerGone`."""
GONE: Final = frozenset({WorkerState.FINISHED, WorkerState.LEFT, WorkerState.LOST})
ALIVE: Final = frozenset(WorkerState) - GONE
# A name of the class is looked up by a function.
_STARTING, _READY, _HOLDING = _USUAL = (WorkerState.STARTING, WorkerState.READY, WorkerState.HOLDING)


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    state: WorkerState
    agent: str = ""
    """The agent that started it; empty when none did, or that agent is gone."""
    part: int = 0
    """The part of the model that it has for its whole life (`unisono.membership.parts`)."""
    info: MemberInfo | None = None
    phase: int = 0
    generation: int = 0
    """The newest generation for which it sent `Holding`."""
    heard_at: float = 0.0
    """Time of its last message; while it is ordered: time at which it was to be started."""
    closed_at: float | None = None
    """Since when its connection is closed."""
    beat: Beat | None = None
    late_at: int = -1
    """The progress value at which it was reported late."""
    draining: bool = False
    num_unreached: int = 0
    """How often in a row the members could not exchange with the newcomers, of which it was one."""
    warning: str = ""
    """Warning with which it was admitted."""
    came: str = ""
    """Why it was ordered; "": the run began with it."""
    gone: str = ""
    """Why it is no member any more, or is about to leave."""
    how: How | None = None
    """In which way it has gone."""

    @property
    def number(self) -> int:
        return number_of(self.worker_id)

    def heard(self, heard_at: float, beat: Beat) -> Worker:
        """Return the worker after a heartbeat."""
        return msgspec.structs.replace(self, heard_at=heard_at, beat=beat, phase=beat.phase)

    @property
    def host(self) -> str:
        """Its host; "": it has not said hello."""
        return self.info.host if self.info is not None else ""

    @property
    def where(self) -> str:
        """Where its last heartbeat says that it is, in words; "": nothing says so."""
        beat = self.beat
        return position_words(beat.step, beat.microbatch, beat.samples, evaluates=beat.evaluates) if beat else ""

    @property
    def name(self) -> str:
        return f"worker {self.worker_id} (pid {self.info.pid})" if self.info else f"worker {self.worker_id}"


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    agent_id: str
    host: str
    primary: bool
    offers: int = 1
    """Number of workers that it has room for; 0: of a machine that only starts the run, or is in use."""
    adds: int = 0
    """Number by which it raises `Policy.maximum` while it is connected."""
    pid: int = 0
    url: str = ""
    """Where a head that it starts can be reached; "": it starts none."""
    away_at: float | None = None
    """Since when a head that has taken over waits for it."""
    lags: bool = False
    """It has not answered in time that it holds the state, so decisions do not wait for it."""
    wanted: int = 0
    """Number of workers that it had, or was to start, when its connection broke."""
    launched: str = ""
    """Name of its machine, where the run's command has started it, by a launcher; "": it has joined by itself."""
    used_restarts: int = 0
    has_served: bool = False
    """One of its workers has held the run's state."""
    failure: str = ""
    """Why the last of its workers was lost, while none had served yet."""
    withdrawn: str = ""
    """Why it has taken its offer back: its machine is in use."""
    refused: str = ""
    """Reason why it is sent away: none of its workers could take part."""
    freed: str = ""
    """Reason why it may end: the run wants fewer workers."""
    gone: str = ""
    """Why it is not connected any more, or is about to leave."""

    @property
    def is_sent_away(self) -> bool:
        """Return whether it is about to end, and gets no worker any more."""
        return bool(self.refused or self.freed)


class EarlyCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call, the same on all workers: every worker counts its own calls, so the number says which it is.

    A result stays for the rest of the run: a replacement gets what the others have got.
    """

    kind: str
    """"run.barrier", "run.broadcast", "run.all_gather" or "run.main_first"."""
    came: Mapping[str, bytes] = {}
    """Worker that has come to the call -> its value. Empty once the call is decided."""
    first: str = ""
    """Of `run.main_first`: the worker that runs the block now."""
    failed: tuple[str, ...] = ()
    """The workers whose block has raised an error."""
    is_decided: bool = False
    values: tuple[bytes, ...] = ()
    """The result."""


_newest: list[tuple[Notice | None, tuple[str, ...], frozenset[str]]] = [(None, (), frozenset())]
"""The notice that was asked about last, its members by rank and as a set: almost every rule asks for them."""


def _team_of(notice: Notice | None) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the members in a notice, by rank and as a set; without one, nobody."""
    known, by_rank, ids = _newest[0]
    if known is not notice:
        by_rank = tuple(info.worker_id for info in notice.members) if notice is not None else ()
        ids = frozenset(by_rank)
        _newest[0] = (notice, by_rank, ids)
    return by_rank, ids


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the membership table knows."""

    policy: Policy
    settings: RunSettings = DEFAULTS
    term: int = 1
    """Of the head: one more than that of the head before it."""
    seat: str = ""
    """The agent whose child the head is; "": it has not said hello yet."""
    head: str = ""
    """A name that no other head has."""
    branch: int = 0
    """Number of this head's branch of the run's history (`unisono.core.following`)."""
    before_branch: tuple[str, ...] = ()
    """The newest branches that led to it."""
    heirs: tuple[str, ...] = ()
    """The agents that know this branch, and hold all its decisions."""
    workers: Mapping[str, Worker] = {}
    agents: Mapping[str, Agent] = {}
    absent: Mapping[str, Agent] = {}
    """Agents whose connection broke; if they connect again, they keep their names."""
    num_agents: int = 0
    """Number of agents so far: names are not used again."""
    ended_machines: tuple[str, ...] = ()
    """Machines on which the command has started an agent that has ended."""
    next_number: int = 0
    notice: Notice | None = None
    """The newest."""
    unknown: int = 0
    """The newest generation that a member held although this head had never announced it; 0: none."""
    before: tuple[str, ...] = ()
    """The members of the generation before a planned one."""
    wanted: int = -1
    """Number of workers for which the command was told last to have machines."""
    present: tuple[str, ...] = ()
    """Of these, those of which the command was told last that they need no other agent."""
    waits_with: int = -1
    """Number of workers at which the user was told last that the run waits for more (`Policy.wait_for`)."""
    moved: int = 0
    """The newest generation that a member has taken."""
    held: bool = False
    """A worker has held the run's state: there is something to lose."""
    fingerprint: Mapping[str, str] | None = None
    script: str = ""
    """The checksum of the script's text, as the command that started the run has read it; "": unknown."""
    committed: int = -1
    """The last step that is done."""
    step_seconds: float = 0.0
    measured: Measured = Measured()
    """Rates by number of workers (`Policy.efficiency`)."""
    tried: Mapping[tuple[int, int], tuple[str, Failed]] = {}
    """(step, micro-batch) -> the worker on which its computation raised, and the error."""
    hangs: tuple[Hang, ...] = ()
    """Positions, in the step under way, at which workers hung; the others went on without them."""
    calls: tuple[EarlyCall, ...] = ()
    """What workers say to each other before they join, by the number of the call."""
    begun: BegunRound | None = None
    """The newest round in which a member was seen to wait for a while."""
    leaving: Mapping[str, Leaving] = {}
    """Worker that has left a training loop -> its report."""
    suspected_at: float | None = None
    suspicion: str = ""
    """The worker that has reported the broken exchange, and its error."""
    suspicions: Suspicions = Suspicions()
    unreached: bool = False
    """In the newest generation, a planned one, a member of the generation before could not exchange."""
    finishing: bool = False
    stopping: str = ""
    ended: Ended | None = None
    witness_state: WorkerState = WorkerState.ADMITTED
    """Workers in this state are the witnesses: their heartbeats show that not all are silent. (`noted` finds this and
    the next two.)"""
    witnessed_at: float = 0.0
    """Time of the last message of a witness."""
    due_at: float | None = None
    """When the table needs the next `Tick`."""

    @property
    def branch_name(self) -> str:
        return f"{self.head}.{self.branch}" if self.head else ""

    def is_own(self, branch: str) -> bool:
        """Return whether all decisions are known here on which those who have followed this branch may have acted."""
        return branch in ("", self.branch_name, *self.before_branch)

    def is_kin(self, worker: Worker, branch: str) -> bool:
        """Return whether a worker may come with what it holds: see `is_own`.

        A worker of the head's own machine may have heard of a branch of the head before this one, and its agent not.
        """
        before = self.before_branch[-1].rpartition(".")[0] if self.before_branch else ""
        return self.is_own(branch) or (worker.agent == self.seat and branch.rpartition(".")[0] == before)

    @property
    def generation(self) -> int:
        return self.notice.generation if self.notice else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of the members of the newest generation, by rank."""
        return _team_of(self.notice)[0]

    @property
    def member_ids(self) -> frozenset[str]:
        """The same, for questions who is one."""
        return _team_of(self.notice)[1]

    @property
    def num_coming(self) -> int:
        """Number of machines that the command has started an agent on, and that may still come."""
        came = {agent.launched for agent in (*self.agents.values(), *self.absent.values())} - {""}
        return max(0, self.policy.machines - len(came.union(self.ended_machines)))

    @property
    def label(self) -> str:
        """State of the run in one word: waiting, training, paused, finished or failed."""
        if self.ended is not None:
            return "finished" if self.ended.ok else "failed"
        if self.notice is None or not self.notice.members:
            return "waiting"
        return "paused" if self.notice.paused else "training"

    @property
    def gone_at(self) -> dict[str, float]:
        """When each machine that has not connected yet to a head that has taken over counts as gone, by its agent."""
        waited = self.settings.head_away_s
        return {i: agent.away_at + waited for i, agent in self.agents.items() if agent.away_at is not None}

    def silent_at(self, now: float = math.inf) -> dict[str, float]:
        """Return when each living worker counts as lost if no message arrives any more.

        Args:
            now: if the worker would be lost after ``now`` because others do send messages, that time counts.
        """
        due = _Silence.of(self, now)
        return {worker.worker_id: due.at(worker) for worker in self.workers.values() if worker.state not in GONE}

    @property
    def limits(self) -> Limits:
        """Times after which a worker without progress is late, or hangs; longer where steps are slow."""
        settings, step_s = self.settings, self.step_seconds
        return Limits(
            late_s=max(settings.late_s, 5 * step_s),
            aside_s=max(settings.aside_s, 10 * step_s),
            hang_s=max(settings.hang_s, 10 * step_s),
        )

    @property
    def quiet_s(self) -> float:
        """Time without a message of any witness after which all are silent; longer than between two heartbeats."""
        return (self.settings.heartbeat_s + self.settings.heartbeat_timeout_s) / 2


def excused(state: State, seconds: float, now: float) -> State:
    """Return the state as if the last ``seconds`` up to ``now``, in which no message could arrive, had not passed."""
    workers = {
        worker_id: msgspec.structs.replace(worker, heard_at=max(worker.heard_at, min(worker.heard_at + seconds, now)))
        for worker_id, worker in state.workers.items()
    }
    return msgspec.structs.replace(state, workers=workers)


def resumed(
    state: State, term: int, now: float, *, seat: str = "", head: str = "", branch: str = "", since: float = 0.0
) -> State:
    """Return the state as the head of this term takes it over: all workers and agents have yet to come back.

    Args:
        seat: the agent whose child the head is; "": the same as before.
        head: the head's name.
        branch: the branch that the agent of the seat has followed. If it is newer than the state, others may have acted
            on decisions that are not in the state. They tell what they hold, as nobody else knows it.
        since: the time at which the state was made, by the clock of its machine, minus the same moment by this one's.
    """
    workers = {
        worker_id: msgspec.structs.replace(
            worker, heard_at=max(worker.heard_at - since, now), closed_at=None, beat=None, late_at=-1
        )
        for worker_id, worker in state.workers.items()
    }
    seat = seat or seat_of(state)
    agents = {
        i: agent if i == seat else msgspec.structs.replace(agent, away_at=now) for i, agent in state.agents.items()
    }
    state = msgspec.structs.replace(
        state,
        term=term,
        workers=workers,
        agents=agents,
        seat=seat,
        head=head,
        branch=0,
        before_branch=(*_lengthened(state), *([] if state.is_own(branch) else [branch])),
    )
    state = msgspec.structs.replace(state, suspected_at=None if state.suspected_at is None else now)
    return noted(state, now)


def seat_of(state: State) -> str:
    """Return the agent whose child the head is ("": it is not known yet)."""
    return state.seat or next((agent.agent_id for agent in state.agents.values() if agent.primary), "")


def rebranched(state: State, heirs: tuple[str, ...]) -> State:
    """Return the state with these heirs; in a new branch if one is missing that might start a head of its own.

    The agent whose child the head is starts a head only after this one.
    """
    gone = set(state.heirs) - {*heirs, seat_of(state)}
    if not gone:
        return state if heirs == state.heirs else msgspec.structs.replace(state, heirs=heirs)
    return msgspec.structs.replace(state, heirs=heirs, branch=state.branch + 1, before_branch=_lengthened(state))


def _lengthened(state: State) -> tuple[str, ...]:
    known = (*state.before_branch, state.branch_name) if state.head else state.before_branch
    return known[-KEPT_BRANCHES:]


def noted(state: State, now: float) -> State:
    """Return the state with the notes that `heartbeat.routine` and `due_at` need of all workers."""
    witness_state, heard_at = WorkerState.HOLDING, _heard_at(state, WorkerState.HOLDING)
    if not heard_at:
        witness_state, heard_at = WorkerState.ADMITTED, _heard_at(state, WorkerState.ADMITTED)
    witnessed_at = max(heard_at, default=0.0)
    state = msgspec.structs.replace(state, witness_state=witness_state, witnessed_at=witnessed_at)
    return msgspec.structs.replace(state, due_at=_due_at(state, now))


def _heard_at(state: State, of: WorkerState) -> list[float]:
    return [worker.heard_at for worker in state.workers.values() if worker.state is of]


def _due_at(state: State, now: float) -> float | None:
    """Return a time before which no deadline passes, unless more happens than `heartbeat.routine`."""
    if state.ended is not None:
        return None
    policy = state.policy
    times = [_Silence.of(state, now).soonest(state.workers.values())]
    times += state.gone_at.values()
    if state.suspected_at is not None:
        times.append(state.suspected_at + policy.suspect_s)
    soonest = min(times)
    return soonest if soonest < math.inf else None


class _Silence(msgspec.Struct, frozen=True):
    """Times at which living workers count as lost if no message arrives any more; see `State.silent_at`."""

    agents: Mapping[str, Agent]
    policy: Policy
    settings: RunSettings
    alone_at: float
    """A worker whose last message is older was silent while others were not."""
    together_s: float
    now: float

    @staticmethod
    def of(state: State, now: float) -> _Silence:
        settings = state.settings
        together_s = max(settings.heartbeat_timeout_s, settings.hang_s)
        return _Silence(state.agents, state.policy, settings, state.witnessed_at - state.quiet_s, together_s, now)

    def at(self, worker: Worker) -> float:
        policy = self.policy
        if worker.state is WorkerState.ORDERED:
            return worker.heard_at + START_HANGS * self.settings.hang_s
        if worker.closed_at is not None:
            return worker.closed_at + (policy.reconnect_s if worker.agent in self.agents else policy.grace_s)
        # Before it is a member nobody waits for it, and a long import may well hold its heartbeat up.
        if worker.state is WorkerState.STARTING or worker.state is WorkerState.READY:
            return worker.heard_at + self.together_s
        return self._of_member(worker.heard_at)

    def soonest(self, workers: Collection[Worker]) -> float:
        """Return the first of these times; infinity if there is none. Asked for after every event."""
        connected = [worker for worker in workers if worker.closed_at is None]
        members = [worker.heard_at for worker in connected if worker.state is _HOLDING]
        times = []
        if members:
            first = min(members) + self.settings.heartbeat_timeout_s
            # As long as the first one is not overdue, none is, and each counts by the same time.
            times = [first] if first > self.now else [self._of_member(heard_at) for heard_at in members]
        newcomers = [worker.heard_at for worker in connected if worker.state is _STARTING or worker.state is _READY]
        if newcomers:
            times.append(min(newcomers) + self.together_s)
        if len(members) + len(newcomers) < len(workers):
            others = [w for w in workers if w.closed_at is not None or w.state not in _USUAL]
            times += [self.at(worker) for worker in others if worker.state not in GONE]
        return min(times, default=math.inf)

    def _of_member(self, heard_at: float) -> float:
        alone = heard_at + self.settings.heartbeat_timeout_s
        return alone if heard_at <= self.alone_at or alone > self.now else heard_at + self.together_s


@functools.lru_cache(maxsize=65536)
def number_of(worker_id: str) -> int:
    """Return the position of a worker in the order in which workers were started; 0 for a name of another kind."""
    digits = worker_id.removeprefix("w")
    return int(digits) if digits.isdecimal() else 0
