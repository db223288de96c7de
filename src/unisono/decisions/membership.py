"""Who is in the run: a table, without input, output or clock.

`step` takes the state (`unisono.decisions.roster`), one event and the time, and gives the next state, what is to be
sent, and the reason in one sentence. Everything that the head does about members comes from here.

A *generation* is a version of the membership, announced by a notice. Two kinds:

* **planned** (somebody joins or leaves): the members move together at a step boundary. It is announced only when
  everybody has taken the generation before it, so at most two generations live at any time.
* **immediate** (somebody is lost): exactly the survivors that hold the run's state, at once. A newcomer whose
  planned generation was overtaken goes back to READY and is planned again.

Who survives a loss while a planned generation is on its way? Members move together, so as soon as one of them
has said `Holding` of it, it is the planned generation that counts, otherwise the one before as well: those whom the
plan would have let go still hold nodes of the step.

How a loss is known, fastest first: the agent has seen the process end (milliseconds); the connection has closed
and did not come back; nothing was heard of it for `Policy.heartbeat_timeout_s`; the worker makes no progress while
others wait for it for `Policy.hang_s`; its own report.

Silence is only held against a worker while others are heard. When all are silent, the machine is overloaded or stands
still, or all are in the same long call: no loss before `Policy.hang_s`, and when they are heard again that time counts
for nobody.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from unisono.decisions.hangs import FIRST_STEP, Hang, Limits, Verdict, Waiting, judge
from unisono.decisions.heartbeat import routine
from unisono.decisions.likeness import objection, refusal
from unisono.decisions.roster import ALIVE, GONE, Agent, State, Worker, WorkerState, excused, noted, number_of
from unisono.decisions.suspicion import MAX_TRIES, Suspicions
from unisono.errors import ProtocolError
from unisono.messages import (
    PROTOCOL,
    AgentHello,
    Announcement,
    Beat,
    Drain,
    Ended,
    Evict,
    Failed,
    Finished,
    Hello,
    Holding,
    Leaving,
    Left,
    Lost,
    MemberInfo,
    Message,
    Notice,
    Ready,
    Scale,
    Start,
    StepDone,
    Stop,
    Suspect,
    WorkerExit,
    WorkerLate,
)
from unisono.words import count, exit_words, listed, place_words

__all__ = [
    "TRANSITIONS",
    "Action",
    "Event",
    "Hangup",
    "Send",
    "Tick",
    "agent_name",
    "next_deadline",
    "step",
]


_S = WorkerState
STAY: Final = None

# What a worker may say in which state, and where that leads (STAY: the state is the same, the message counts). What is
# not here breaks the protocol and changes nothing. Those who are gone may still have something under way: ignored.
TRANSITIONS: Final[Mapping[WorkerState, Mapping[type[Message], WorkerState | None]]] = {
    _S.ORDERED: {Hello: _S.STARTING},
    _S.STARTING: {
        Hello: STAY,
        Beat: STAY,
        Ready: _S.READY,
        Failed: STAY,
        Finished: _S.FINISHED,
        Left: _S.LEFT,
    },
    _S.READY: {
        Hello: STAY,
        Beat: STAY,
        Ready: STAY,
        # Sent before it had heard that its generation was overtaken:
        Holding: STAY,
        Suspect: STAY,
        StepDone: STAY,
        Failed: STAY,
        Leaving: STAY,
        Finished: _S.FINISHED,
        Left: _S.LEFT,
    },
    _S.ADMITTED: {
        Hello: STAY,
        Beat: STAY,
        Ready: STAY,
        Holding: _S.HOLDING,
        Suspect: STAY,
        StepDone: STAY,
        Failed: STAY,
        Leaving: STAY,
        Finished: _S.FINISHED,
        Left: _S.LEFT,
    },
    _S.HOLDING: {
        Hello: STAY,
        Beat: STAY,
        Ready: STAY,
        Holding: STAY,
        Suspect: STAY,
        StepDone: STAY,
        Failed: STAY,
        Leaving: STAY,
        Finished: _S.FINISHED,
        Left: _S.LEFT,
    },
    # Whatever it had under way when the others left it behind counts no more.
    _S.ASIDE: {
        **dict.fromkeys((Hello, Beat, Ready, Holding, Suspect, StepDone, Failed, Leaving, Left), STAY),
        Finished: _S.LOST,
    },
    _S.FINISHED: {Hello: STAY},
    _S.LEFT: {},
    _S.LOST: {},
}

FORGIVE_STEPS: Final = 100
MAX_DELAY_S: Final = 30.0
MAX_UNREACHED: Final = 2
"""So often a newcomer may be what the members cannot exchange with; they stand still meanwhile."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Event:
    """``source`` (a worker, an agent, or "" for somebody outside) said this."""

    source: str
    message: Message | Tick


@dataclass(frozen=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True)
class Hangup:
    """Close this worker's connection; it is not to come back."""

    worker_id: str
    reason: str


Action = Send | Hangup


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...], str]:
    """What follows from one event.

    Returns:
        The next state, what to do (in this order), and why: one sentence, empty when nothing was decided.

    Raises:
        ProtocolError: this source may not say this now. Nothing has changed.
    """
    if state.ended is not None:
        return state, (), ""
    if isinstance(event.message, Beat) and (found := routine(state, event.source, event.message, now)) is not None:
        return found, (), ""
    turn = _Turn(state, now)
    turn.take(event)
    if turn.actions or turn.broken or not isinstance(event.message, Beat):  # most events are heartbeats
        turn.settle()
    return noted(turn.state, now), tuple(turn.actions), "; ".join(dict.fromkeys(turn.reasons))


def next_deadline(state: State) -> float | None:
    """When the table wants to see a `Tick`; None: only when something happens."""
    return state.due_at


def agent_name(state: State, hello: AgentHello) -> str:
    """What an agent is called: as before, if it is one whose connection broke, or that has not noticed yet."""
    known = {**state.absent, **state.agents}.get(hello.agent_id)
    is_back = known is not None and (known.host, known.pid) == (hello.host, hello.pid)
    return hello.agent_id if is_back else f"agent{state.num_agents}"


class _Turn:
    """One call of `step`: a draft of the next state."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []
        self.reasons: list[str] = []
        self.broken: list[str] = []  # why the newest generation cannot go on
        self.drained: list[str] = []  # who was asked to leave, until a generation without them is announced

    # -- small moves ---------------------------------------------------------------------------------

    def put(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)

    def worker(self, worker_id: str, **changes: Any) -> Worker:
        worker = dataclasses.replace(self.state.workers[worker_id], **changes)
        self.put(workers={**self.state.workers, worker_id: worker})
        return worker

    def agent(self, agent_id: str, **changes: Any) -> Agent:
        agent = dataclasses.replace(self.state.agents[agent_id], **changes)
        self.put(agents={**self.state.agents, agent_id: agent})
        return agent

    def send(self, to: str, message: Message) -> None:
        self.actions.append(Send(to, message))

    def workers(self, *states: WorkerState) -> list[Worker]:
        return sorted((w for w in self.state.workers.values() if w.state in states), key=lambda w: w.number)

    def holders(self) -> list[str]:
        """Who could go on if the newest generation broke now (see the top of this file)."""
        state = self.state
        pool = set(state.members)
        if not self.moved():
            pool |= set(state.before)
        return [w.worker_id for w in self.workers(_S.HOLDING) if w.worker_id in pool]

    def moved(self) -> bool:
        state = self.state
        return any(state.workers[m].generation == state.generation for m in state.members)

    def taken(self) -> bool:
        """Everybody has taken the newest generation."""
        state, generation = self.state, self.state.generation
        return all(
            worker.state in GONE or (worker.state is _S.HOLDING and worker.generation == generation)
            for worker in (state.workers[m] for m in state.members)
        )

    def end(self, ok: bool, reason: str, worker_id: str = "", traceback: str = "", exit_code: int = 1) -> None:
        ended = Ended(
            ok=ok,
            reason=reason,
            worker_id=worker_id,
            traceback=traceback,
            exit_code=0 if ok else max(exit_code, 1),
            step=self.state.committed,
        )
        self.put(ended=ended)
        self.reasons.append(reason)
        for worker in self.state.workers.values():
            if worker.state in ALIVE - {_S.ORDERED} or worker.state is _S.FINISHED:
                self.send(worker.worker_id, ended)
        for agent_id in self.state.agents:
            self.send(agent_id, ended)

    # -- events --------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        message = event.message
        if isinstance(message, Tick):
            self.tick()
        elif event.source in self.state.agents or isinstance(message, AgentHello):
            self.from_agent(event.source, message)
        elif event.source in self.state.workers or isinstance(message, Hello):
            self.from_worker(event.source, message)
        elif isinstance(message, Scale):
            self.scale(message.num_workers)
        elif isinstance(message, Stop):
            self.stop(message.reason)
        elif not isinstance(message, Lost):
            raise ProtocolError(f"{event.source or 'somebody'} said {type(message).__name__} before a hello")

    def from_agent(self, agent_id: str, message: Message) -> None:
        match message:
            case AgentHello():
                self.agent_joins(agent_id, message)
            case WorkerExit():
                self.worker_exit(message)
            case Drain():
                ids = message.worker_ids or [w.worker_id for w in self.state.workers.values() if w.agent == agent_id]
                self.drain(ids, message.reason or f"the agent of {self.state.agents[agent_id].host} asks for it")
            case Scale():
                self.scale(message.num_workers)
            case Stop():
                self.stop(message.reason)
            case Ended() if self.state.agents[agent_id].primary:
                self.end(False, message.reason, exit_code=message.exit_code)
            case Lost():
                self.agent_leaves(agent_id, message)
            case _:
                raise ProtocolError(f"an agent may not say {type(message).__name__}")

    def from_worker(self, worker_id: str, message: Message) -> None:
        if isinstance(message, Lost):
            worker = self.state.workers[worker_id]
            if worker.state in ALIVE and worker.closed_at is None:
                self.worker(worker_id, closed_at=self.now)
            return
        if isinstance(message, Hello):
            _check_protocol(f"worker {worker_id}", message.protocol)
        if isinstance(message, Hello) and worker_id not in self.state.workers:
            # Nobody here has ordered it (another launcher has, or a head before this one).
            worker = Worker(worker_id=worker_id, state=_S.ORDERED)
            self.put(
                workers={**self.state.workers, worker_id: worker},
                next_number=max(self.state.next_number, worker.number + 1),
            )
        worker = self.state.workers[worker_id]
        if worker.state in GONE and not isinstance(message, Hello):
            return
        if worker.state in (
            _S.LOST,
            _S.LEFT,
        ):  # its machine was cut off; or it was still starting when it was dismissed
            why = "it was out of reach" if worker.state is _S.LOST else "it was sent away"
            self.actions.append(Hangup(worker_id, f"the run goes on without {worker.name}: {why}"))
            return
        table = TRANSITIONS[worker.state]
        if type(message) not in table:
            raise ProtocolError(f"{worker.name} is {worker.state.value} and may not say {type(message).__name__}")
        newest = max(self.state.generation, self.state.unknown)
        if isinstance(message, Holding) and not 0 < message.generation <= newest:
            raise ProtocolError(f"{worker.name} holds generation {message.generation}, the newest is {newest}")
        following = table[type(message)]
        if isinstance(message, Holding) and message.generation != self.state.generation and worker.state is _S.ADMITTED:
            following = STAY  # of a generation that was overtaken; it is in the next one as a newcomer
        gap = self.now - self.state.witnessed_at
        if gap > self.state.quiet_s and worker.state is self.state.witness_state:
            self.state = excused(self.state, gap, self.now)
        worker = self.worker(worker_id, state=following or worker.state, heard_at=self.now)
        self.heard(worker, message)

    def heard(self, worker: Worker, message: Message) -> None:
        """What a worker may say by the table, and has said."""
        worker_id = worker.worker_id
        if worker.state is _S.ASIDE and not isinstance(message, (Hello, Beat)):
            return
        if worker.state is _S.LOST:
            self.lose(worker_id, f"{worker.name} has ended its script, and the others had gone on without it")
            return
        match message:
            case Hello():
                self.hello(worker, message)
            case Ready():
                self.worker(worker_id, phase=message.phase)
            case Holding():
                if worker.state is _S.HOLDING:
                    generation = max(worker.generation, message.generation)
                    self.worker(worker_id, generation=generation, num_unreached=0)
                    self.put(held=True)
                    if worker.agent in self.state.agents and not self.state.agents[worker.agent].has_served:
                        self.agent(worker.agent, has_served=True, failure="")
            case Beat():
                self.worker(worker_id, beat=message, phase=message.phase)
                self.watch(self.state.workers[worker_id], message)
                self.compare_ways(self.state.workers[worker_id], message)
                self.forget_ways()
            case Suspect():
                self.suspect(worker, message)
            case StepDone():
                self.step_done(message)
            case Failed():
                self.failed(worker, message)
            case Leaving():
                self.put(leaving={**self.state.leaving, worker_id: message})
                for other in self.workers(_S.HOLDING):
                    if other.beat is not None:
                        self.compare_ways(other, other.beat)
            case Finished():
                self.finished(worker, message)
            case Left():
                if worker_id in self.state.members:
                    self.broken.append(f"{worker.name} has left")
                elif not self.state.stopping:
                    self.reasons.append(f"{worker.name} has left")

    # -- agents --------------------------------------------------------------------------------------

    def agent_joins(self, agent_id: str, hello: AgentHello) -> None:
        state = self.state
        _check_protocol(f"the agent of {hello.host}", hello.protocol)
        known = state.agents.get(agent_id)
        if known is not None and hello.agent_id != agent_id:
            raise ProtocolError(f"agent {agent_id} has said hello twice")
        if known is not None:
            self.agent(agent_id, away_at=None)
            self.repeat_start(agent_id)
            return
        known = state.absent.get(hello.agent_id)
        adds = hello.num_workers if state.policy.grows and not hello.primary else 0
        fresh = known or Agent(agent_id=agent_id, host=hello.host, primary=hello.primary)
        agent = dataclasses.replace(fresh, adds=adds, pid=hello.pid, away_at=None)
        self.put(
            agents={**state.agents, agent_id: agent},
            absent={i: absent for i, absent in state.absent.items() if i != agent_id},
            num_agents=state.num_agents + (known is None),
            policy=dataclasses.replace(state.policy, maximum=state.policy.maximum + adds),
        )
        if known is not None:
            self.reasons.append(f"the agent of {hello.host} is back")
        elif not hello.primary:
            self.reasons.append(f"{hello.host} joins with {count(hello.num_workers, 'worker')}")
        self.repeat_start(agent_id)
        self.order(agent_id, hello.num_workers if known is None else self.missing(agent))

    def missing(self, agent: Agent) -> int:
        """How many workers a machine that is back has lost meanwhile, as far as there may be so many."""
        state = self.state
        if agent.refused or state.finishing or state.stopping:
            return 0
        alive = [w for w in self.workers(*ALIVE) if not w.draining]
        own = [w for w in alive if w.agent == agent.agent_id]
        return max(0, min(agent.wanted - len(own), state.policy.maximum - len(alive)))

    def repeat_start(self, agent_id: str) -> None:
        """For an agent that comes back: what the head had said last may be lost. It starts nobody twice."""
        if refused := self.state.agents[agent_id].refused:
            self.send(agent_id, Ended(ok=False, reason=refused, exit_code=1))
        for worker in self.workers(_S.ORDERED):
            if worker.agent == agent_id:
                delay_s = max(0.0, worker.heard_at - self.now)
                self.send(agent_id, Start(worker_ids=[worker.worker_id], delay_s=delay_s))

    def order(self, agent_id: str, num_workers: int, delay_s: float = 0.0, reason: str = "") -> None:
        first = self.state.next_number
        ids = [f"w{number}" for number in range(first, first + num_workers)]
        if not ids:
            return
        due = self.now + delay_s
        ordered = {i: Worker(worker_id=i, state=_S.ORDERED, agent=agent_id, heard_at=due) for i in ids}
        self.put(workers={**self.state.workers, **ordered}, next_number=first + num_workers)
        self.send(agent_id, Start(worker_ids=ids, delay_s=delay_s, reason=reason))

    def agent_leaves(self, agent_id: str, message: Lost) -> None:
        agent = self.state.agents[agent_id]
        own = [w for w in self.workers(*ALIVE) if w.agent == agent_id]
        wanted = sum(not worker.draining for worker in own)
        self.put(
            agents={i: a for i, a in self.state.agents.items() if i != agent_id},
            absent={**self.state.absent, agent_id: dataclasses.replace(agent, wanted=wanted)},
        )
        if agent.primary:
            self.end(False, f"the command that started the run is gone ({message.reason})")
            return
        policy = self.state.policy
        if policy.grows:  # not after `unisono scale`, which says how many there shall be
            self.put(policy=dataclasses.replace(policy, maximum=policy.maximum - agent.adds))
        self.reasons.append(f"the agent of {agent.host} is gone")
        for worker in own:
            if worker.state is _S.ORDERED:
                self.worker(worker.worker_id, state=_S.LEFT)

    def worker_exit(self, message: WorkerExit) -> None:
        worker = self.state.workers.get(message.worker_id)
        if worker is None or worker.state not in ALIVE:
            return
        words = f"{worker.name} {exit_words(message.exit_code)}"
        killed = message.exit_code in (-signal.SIGKILL, -signal.SIGTERM)
        is_guest = self.is_guest(worker)
        if self.state.notice is None and not killed and not is_guest:
            # Nothing has been trained, and most likely no other process would fare better.
            self.end(False, words, worker.worker_id, message.last_words, message.exit_code)
            return
        is_tried = self.is_tried(worker)
        self.lose(worker.worker_id, words, replace=killed or ((not is_guest or self.state.held) and is_tried))
        if message.last_words:
            self.tell(worker, f"the last words of {worker.name}:\n{message.last_words}")

    def is_guest(self, worker: Worker) -> bool:
        """Whether it belongs to a machine that has joined, and the command that started the run has workers left."""
        agents = self.state.agents
        own = [w for w in self.workers(*ALIVE) if w.agent in agents and agents[w.agent].primary]
        return worker.agent in agents and not agents[worker.agent].primary and bool(own)

    def is_tried(self, worker: Worker) -> bool:
        """Whether a failure of this worker is not what all workers of its machine would meet."""
        agent = self.state.agents.get(worker.agent)
        return agent is None or agent.primary or agent.has_served

    def fails(self, worker: Worker, why: str) -> None:
        """Note why a worker could not take part, of a machine of which none has taken part yet."""
        if not self.is_tried(worker):
            self.agent(worker.agent, failure=why)

    def turn_away(self) -> None:
        """Send away a machine that has joined, and of whose workers none could take part."""
        if self.state.finishing or self.state.stopping:
            return
        for agent_id, agent in self.state.agents.items():
            if agent.failure and not agent.refused and not any(w.agent == agent_id for w in self.workers(*ALIVE)):
                why = f"{agent.host} is sent away: none of its workers could take part; the last: {agent.failure}"
                self.agent(agent_id, refused=why)
                self.reasons.append(why)
                self.send(agent_id, Ended(ok=False, reason=why, exit_code=1))

    def tell(self, worker: Worker, text: str) -> None:
        if worker.agent in self.state.agents:
            self.send(worker.agent, Announcement(text=text))

    # -- a worker's life -----------------------------------------------------------------------------

    def catch_up(self, worker: Worker, generation: int) -> None:
        """A head before this one has announced a generation, and its memory of that is lost.

        Its number is not used again: members would not listen. Those who hold the state go on in the next one.
        """
        if generation <= max(self.state.generation, self.state.unknown):
            return
        self.put(unknown=generation)
        if self.state.members:
            self.broken.append(f"{worker.name} holds generation {generation}, which this head does not know")

    def hello(self, worker: Worker, message: Hello) -> None:
        worker_id = worker.worker_id
        self.catch_up(worker, message.generation)
        if worker.info is not None:
            if worker.info.pid != message.info.pid:
                raise ProtocolError(f"{worker.name} is here already; pid {message.info.pid} has taken its name")
            self.worker(worker_id, closed_at=None)
            notice = self.state.notice
            # Also who was left out meanwhile: it hears that the others have gone on.
            concerned = worker_id in {*self.state.members, *self.state.before}
            concerned = concerned or message.generation > 0  # perhaps in one that this head has not known
            if notice is not None and (concerned or worker.state in (_S.ADMITTED, _S.HOLDING, _S.ASIDE)):
                self.send(worker_id, notice)
            return
        if message.info.worker_id != worker_id:
            raise ProtocolError(f"worker {worker_id} gives itself the name {message.info.worker_id}")
        worker = self.worker(worker_id, info=message.info)
        if text := refusal(self.state, message):
            self.refuse(worker, f"{worker.name} on {message.info.host} {text}")
            return
        known = self.state.fingerprint or dict(message.fingerprint)
        self.put(fingerprint=known, script=self.state.script or message.script)
        if text := objection(self.state, message):
            text = f"{worker.name} on {message.info.host} {text}"
            self.worker(worker_id, warning=text)
            self.reasons.append(f"{text}; the same bits at any number of workers no longer hold while it takes part")

    def refuse(self, worker: Worker, why: str) -> None:
        """Send away somebody who would compute something else; another process there would fare no better."""
        self.worker(worker.worker_id, state=_S.LEFT)
        self.send(worker.worker_id, Ended(ok=False, reason=why, worker_id=worker.worker_id, exit_code=1))
        self.evict(worker, why)
        self.fails(worker, why)
        self.reasons.append(why)

    def watch(self, worker: Worker, beat: Beat) -> None:
        """Is this worker late, or hanging? See `unisono.decisions.hangs`."""
        state, limits = self.state, self.state.limits
        if worker.state is _S.ASIDE and beat.seconds_at > limits.hang_s:
            self.end_hanging(worker, f"{worker.name} hangs for {beat.seconds_at:.0f} s and is ended")
        if worker.state is not _S.HOLDING:
            return
        if worker.draining and self.is_out(worker):
            if beat.seconds_at > limits.hang_s * (FIRST_STEP if beat.num_steps <= 1 else 1):
                why = f"{worker.name}, which was to leave, hangs for {beat.seconds_at:.0f} s and is ended"
                self.end_hanging(worker, why)
            return
        if state.hangs:
            self.put(hangs=tuple(hang for hang in state.hangs if not hang.is_passed(beat)))
        if beat.waiting or beat.seconds_at <= limits.shortest_s:
            return
        known = next((h for h in self.hangs_of_others(worker, limits) if h.is_at(beat)), None)
        where = place_words(beat.step, beat.microbatch, beat.samples, evaluates=beat.evaluates)
        match judge(beat, self.waiting_for(worker), is_known=known is not None, limits=limits):
            case Verdict.HANGS_AGAIN:
                assert known is not None
                first = state.workers[known.worker_id].name
                self.end(
                    False,
                    f"{worker.name} hangs: no progress for {beat.seconds_at:.0f} s at {where}, where {first} has hung "
                    f"as well (for {known.beat.seconds_at:.0f} s). It is not a worker but what is computed or loaded "
                    "there; its stack is shown above. Where that may take so long, say --hang-s",
                    worker.worker_id,
                )
            case Verdict.HANGS_AT_END:
                self.end(
                    False,
                    f"{worker.name} has not come to the end of the run: no progress for {beat.seconds_at:.0f} s, and "
                    "the others wait for it there; its stack is shown above. Where what it does after the training "
                    "loop may take so long, say --hang-s (a tenth of the time), or do it after the `with unisono.Run`",
                    worker.worker_id,
                )
            case Verdict.HANGS:
                self.note_hang(worker, beat)
                why = f"{worker.name} hangs: no progress for {beat.seconds_at:.0f} s at {where}"
                self.end_hanging(worker, why)
            case Verdict.ASIDE:
                self.note_hang(worker, beat)
                self.worker(worker.worker_id, state=_S.ASIDE)
                self.broken.append(
                    f"{worker.name} gets nowhere for {beat.seconds_at:.0f} s at {where} and is left aside"
                )
            case Verdict.LATE if worker.late_at != beat.progress:
                self.worker(worker.worker_id, late_at=beat.progress)
                self.reasons.append(f"{worker.name} is late: no progress for {beat.seconds_at:.1f} s at {where}")
                late = WorkerLate(
                    worker_id=worker.worker_id, step=beat.step, microbatch=beat.microbatch, seconds=beat.seconds_at
                )
                self.send(worker.worker_id, late)

    def hangs_of_others(self, worker: Worker, limits: Limits) -> Iterator[Hang]:
        """Return where others have hung, and where others hang now: in a rehearsal two compute one micro-batch."""
        yield from (hang for hang in self.state.hangs if hang.worker_id != worker.worker_id)
        for other in self.workers(_S.HOLDING):
            beat = other.beat
            if other.worker_id == worker.worker_id or beat is None or beat.waiting or beat.microbatch < 0:
                continue
            if beat.seconds_at > limits.hang_s:
                yield Hang(worker_id=other.worker_id, beat=beat)

    def waiting_for(self, worker: Worker) -> Waiting:
        """Who waits while this one computes."""
        waiting = [w for w in self.workers(_S.ADMITTED, _S.HOLDING) if w.beat and w.beat.waiting]
        others = [w for w in waiting if w.worker_id != worker.worker_id]
        if members := [w for w in others if w.state is _S.HOLDING]:
            return Waiting.FINISHERS if all(self.is_at_end(w) for w in members) else Waiting.MEMBERS
        return Waiting.NEWCOMERS if others else Waiting.NOBODY

    def is_at_end(self, worker: Worker) -> bool:
        """Whether a worker has come to the end of its ``with unisono.Run(...)``."""
        left = self.state.leaving.get(worker.worker_id)
        return left is not None and not left.goes_on

    def is_out(self, worker: Worker) -> bool:
        """Whether the others have gone on without a worker that holds the run's state, and is to leave."""
        return worker.worker_id not in self.state.members and worker.worker_id not in self.holders()

    def end_hanging(self, worker: Worker, why: str) -> None:
        self.evict(worker, why)
        self.lose(worker.worker_id, why)

    def note_hang(self, worker: Worker, beat: Beat) -> None:
        """Remember a micro-batch: between two steps all members may do for long what another has hung in."""
        if beat.microbatch < 0:
            return
        self.put(hangs=(*self.state.hangs, Hang(worker_id=worker.worker_id, beat=beat)))

    def suspect(self, worker: Worker, message: Suspect) -> None:
        state = self.state
        # While a planned generation is on its way and nobody has taken it, it is the one before that has broken.
        overtaken = (
            state.notice is not None
            and not state.notice.immediate
            and not self.moved()
            and worker.worker_id in state.before
            and message.generation == worker.generation
        )
        if not overtaken and (message.generation != state.generation or worker.worker_id not in state.members):
            return  # the cause is known already
        if message.generation == state.generation and worker.worker_id in state.before:
            self.put(unreached=True)
        self.put(suspicions=state.suspicions.reported(worker.worker_id, message.peers))
        self.go_on_without_deserters(worker, message.peers)
        if state.suspected_at is None:  # told when nothing else explains it by then
            self.put(suspected_at=self.now, suspicion=f"{worker.name}: {message.reason}")

    def step_done(self, message: StepDone) -> None:
        state = self.state
        if message.step <= state.committed:
            return
        forgiven = message.step // FORGIVE_STEPS - state.committed // FORGIVE_STEPS if state.committed >= 0 else 0
        for agent_id, agent in state.agents.items() if forgiven else ():
            self.agent(agent_id, used_restarts=max(0, agent.used_restarts - forgiven))
        self.put(
            committed=message.step,
            step_seconds=message.seconds,
            suspicions=Suspicions(),
        )
        passed = {key: value for key, value in state.tried.items() if key[0] <= message.step}
        if passed:
            self.put(tried={key: value for key, value in state.tried.items() if key not in passed})
        for (step_, microbatch), (worker_id, failure) in passed.items():
            worker = state.workers[worker_id]
            self.reasons.append(
                f"{worker.name} is suspect: micro-batch {microbatch} of step {step_} raised {failure.error!r} there "
                "and passed elsewhere"
            )
            self.replace(worker)

    def failed(self, worker: Worker, message: Failed) -> None:
        key = (message.step, message.microbatch)
        where = place_words(message.step, message.microbatch, message.samples)
        words = f"{worker.name} failed{' at ' if where else ''}{where}: {message.error}"
        others = [w for w in self.workers(_S.HOLDING) if w.worker_id != worker.worker_id]
        if message.retry and worker.state is _S.HOLDING and others:
            first = self.state.tried.get(key)
            if first is None or first[0] == worker.worker_id:
                self.put(tried={**self.state.tried, key: (worker.worker_id, message)})
                self.lose(worker.worker_id, f"{words}; another worker tries it", replace=False)
                return
            words += f" (as before on worker {first[0]})"
        is_new = not message.retry and worker.state in (_S.STARTING, _S.READY, _S.ADMITTED)
        if is_new and ((self.state.held and others) or self.is_guest(worker)):
            # It has never been a member: what it lacks (a package, a file) the members have.
            self.lose(worker.worker_id, words, replace=self.state.held and self.is_tried(worker))
            self.tell(worker, message.traceback)
            return
        self.end(False, words, worker.worker_id, message.traceback, message.exit_code)

    def finished(self, worker: Worker, message: Finished) -> None:
        """The first member that finishes closes the door behind it: newcomers have nothing left to do.

        One that has left the training loop does not, as long as others may go on.
        """
        leaving = {i: place for i, place in self.state.leaving.items() if i != worker.worker_id}
        if message.step >= 0:
            leaving[worker.worker_id] = Leaving(phase=message.phase, step=message.step)
        self.put(leaving=leaving)
        state = self.state
        if worker.worker_id not in {*state.members, *state.before} or not state.held:
            return
        members = [w for w in self.workers(_S.HOLDING) if w.worker_id in {*state.members, *state.before}]
        if message.step >= 0 and members:
            for other in members:
                if (peers := state.suspicions.reports.get(other.worker_id)) is not None:
                    self.go_on_without_deserters(other, peers)
            return
        self.put(finishing=True)

    def compare_ways(self, worker: Worker, beat: Beat) -> None:
        """A member is in a step: have others left the training loop before it?"""
        if not self.state.leaving or worker.state is not _S.HOLDING or beat.evaluates or self.state.ended is not None:
            return
        for worker_id, left in self.state.leaving.items():
            other = self.state.workers[worker_id]
            is_beyond = beat.step >= left.step if beat.phase == left.phase else beat.phase > left.phase
            if worker_id == worker.worker_id or not is_beyond or (left.goes_on and beat.phase != left.phase):
                continue
            if other.state is _S.FINISHED:
                self.go_on_without_deserters(worker, [worker_id])
            elif other.state is _S.HOLDING:
                begun = f"step {beat.step}" + ("" if beat.phase == left.phase else " of another run.steps")
                self.end(
                    False,
                    f"{other.name} has left the training loop before step {left.step} (by a break or a return that "
                    f"only it reached?), and {worker.name} has begun {begun}. All workers must leave the loop at the "
                    "same step: decide by step.loss or the totals of run.evaluate, which are the same on all workers, "
                    "and not by run.rank, the time, or a number that was summed within `for batch in step`",
                    worker_id,
                )
                return

    def forget_ways(self) -> None:
        """Forget what was said of a loop that all members have left, and what the lost had said.

        What one has said who was lost at the end of its run still shows that another has not ended there alone.
        """
        state = self.state
        if not state.leaving:
            return
        beats = [worker.beat for worker in self.workers(_S.HOLDING)]
        finished = {(p.phase, p.step) for i, p in state.leaving.items() if state.workers[i].state is _S.FINISHED}

        def counts(worker_id: str, left: Leaving) -> bool:
            if left.goes_on and all(beat is not None and beat.phase > left.phase for beat in beats):
                return False
            is_gone = state.workers[worker_id].state in (_S.LOST, _S.LEFT)
            return not is_gone or (not left.goes_on and (left.phase, left.step) in finished)

        kept = {worker_id: left for worker_id, left in state.leaving.items() if counts(worker_id, left)}
        if len(kept) < len(state.leaving):
            self.put(leaving=kept)

    def go_on_without_deserters(self, worker: Worker, missed: Collection[str]) -> None:
        """A member goes on with the training: those whose script has ended in the middle of it are lost.

        Args:
            missed: whom that member misses; empty: it does not know.
        """
        if self.is_at_end(worker):
            return
        for worker_id, left in self.state.leaving.items():
            other = self.state.workers[worker_id]
            if other.state is _S.FINISHED and (not missed or worker_id in missed):
                self.lose(
                    worker_id,
                    f"{other.name} has left the training loop at step {left.step - 1} and ended with exit code 0 (by "
                    f"sys.exit, or the end of its script), and {worker.name} has not",
                )

    def dismiss(self, worker: Worker, reason: str) -> None:
        """Send away somebody who is not needed and holds nothing."""
        self.worker(worker.worker_id, state=_S.LEFT)
        if worker.state is not _S.ORDERED:
            self.send(worker.worker_id, Ended(ok=True, reason=reason))
        self.evict(worker, reason)

    def send_away(self, worker: Worker) -> None:
        """Dismiss somebody with whom the others cannot exchange."""
        place = f" at {worker.info.address}" if worker.info else ""
        why = (
            f"{worker.name}{place} is sent away: in {MAX_UNREACHED} attempts the others could not exchange with it. "
            "Workers connect to each other directly, at ports that the system chooses: does a firewall between the "
            "machines keep that from them?"
        )
        self.dismiss(worker, why)
        self.fails(worker, why)
        self.reasons.append(why)

    def evict(self, worker: Worker, reason: str) -> None:
        if worker.agent in self.state.agents:
            self.send(worker.agent, Evict(worker_id=worker.worker_id, reason=reason))

    # -- losing and replacing ------------------------------------------------------------------------

    def lose(self, worker_id: str, why: str, *, replace: bool = True) -> None:
        worker = self.state.workers[worker_id]
        if worker_id in self.state.members or worker_id in self.holders():
            self.broken.append(why)
        else:
            self.reasons.append(why)
        self.worker(worker_id, state=_S.LOST)
        self.fails(worker, why)
        self.actions.append(Hangup(worker_id, why))
        if replace:
            self.replace(worker)

    def replace(self, worker: Worker) -> None:
        state, policy = self.state, self.state.policy
        if worker.draining or state.finishing or state.stopping:
            return
        alive = [w for w in self.workers(*ALIVE) if not w.draining]
        if len(alive) >= policy.maximum:
            return
        agent = state.agents.get(worker.agent)
        if agent is None or agent.refused:
            self.reasons.append("nobody is there to start another one")
        elif agent.used_restarts >= policy.max_restarts:
            place = f"on {agent.host} " if len(state.agents) > 1 else ""
            number = policy.max_restarts
            self.reasons.append(f"it is not replaced: {place}all {number} restarts are used (--max-restarts)")
        else:
            used = agent.used_restarts
            delay_s = 0.0 if used == 0 else min(MAX_DELAY_S, 2.0 ** (used - 1))
            self.agent(worker.agent, used_restarts=used + 1)
            soon = "now" if delay_s == 0 else f"in {delay_s:.0f} s"
            reason = f"worker w{state.next_number} replaces it {soon} (restart {used + 1} of {policy.max_restarts})"
            self.reasons.append(reason)
            self.order(worker.agent, 1, delay_s, reason)

    # -- from outside --------------------------------------------------------------------------------

    def drain(self, worker_ids: Iterable[str], why: str) -> None:
        names = []
        for worker_id in worker_ids:
            worker = self.state.workers.get(worker_id)
            if worker is None or worker.state not in ALIVE or worker.draining:
                continue
            names.append(worker_id)
            worker = self.worker(worker_id, draining=True)
            if worker.state in (_S.ORDERED, _S.STARTING, _S.READY):
                self.dismiss(worker, f"drained: {why}")
        if names:
            self.reasons.append(why)
            self.drained += names

    def scale(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ProtocolError(f"a run has at least 1 worker, got {num_workers}; `unisono stop` ends it")
        policy = self.state.policy
        minimum = min(policy.minimum, num_workers)
        start = min(policy.start, num_workers)
        self.put(policy=dataclasses.replace(policy, minimum=minimum, start=start, maximum=num_workers, grows=False))
        staying = [w for w in self.workers(*ALIVE) if not w.draining]
        missing = num_workers - len(staying)
        why = f"scaled to {count(num_workers, 'worker')}, from {len(staying)}"
        self.reasons.append(why)
        if missing < 0:
            self.drain([w.worker_id for w in staying[missing:]], why)
        elif missing > 0:
            agents = sorted(
                (agent for agent in self.state.agents.values() if not agent.refused),
                key=lambda agent: not agent.primary,
            )
            if agents:
                self.order(agents[0].agent_id, missing, reason="scaled up")
            else:
                self.reasons.append("nobody is there to start more")

    def stop(self, reason: str) -> None:
        self.put(stopping=self.state.stopping or reason or "stopped")
        self.reasons.append(f"{self.state.stopping}: the run ends at the end of the step")

    # -- time ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        for worker_id, deadline in self.state.silent_at().items():
            if deadline > self.now:
                continue
            worker = self.state.workers[worker_id]
            if worker.state is _S.ORDERED:
                why = f"{worker.name} has not come in the {self.now - worker.heard_at:.0f} s since it was to be started"
            elif worker.closed_at is not None:
                why = f"{worker.name} has closed its connection"
            else:
                why = f"{worker.name} has been silent for {self.now - worker.heard_at:.1f} s"
            self.evict(worker, why)
            self.lose(worker.worker_id, why)
        for agent_id, agent in self.state.agents.items():
            if agent.away_at is not None and agent.away_at + self.state.policy.away_s <= self.now:
                self.agent_leaves(agent_id, Lost(reason="it has not come back"))
        state = self.state
        if state.suspected_at is not None and state.suspected_at + state.policy.suspect_s <= self.now:
            self.put(suspected_at=None)
            self.try_again()

    def try_again(self) -> None:
        """An exchange broke and nobody was lost: the same members try again; at last one of them has to go."""
        state = self.state
        newcomers = [state.workers[i] for i in state.members if i not in state.before]
        if state.unreached and newcomers and all(w.state is _S.ADMITTED for w in newcomers):
            for newcomer in newcomers:
                self.worker(newcomer.worker_id, num_unreached=newcomer.num_unreached + 1)
            self.put(suspicions=dataclasses.replace(state.suspicions, reports={}))
            names = listed([newcomer.worker_id for newcomer in newcomers])
            self.broken.append(f"{state.suspicion}; the others go on without {names}")
            return
        if (
            state.before
            and not state.unreached
            and not self.moved()
            and not state.suspicions.reports.keys() - {newcomer.worker_id for newcomer in newcomers}
        ):
            # The newcomers have waited for members that are still in a step. That may be long, and is no fault.
            self.broken.append(f"{state.suspicion}; the members have not come to a step boundary: trying again")
            return
        present = [w.worker_id for w in self.workers(_S.ADMITTED, _S.HOLDING) if w.worker_id in state.members]
        suspicions = state.suspicions.given_up(present)
        self.put(suspicions=suspicions)
        if suspicions.num_broken < MAX_TRIES or not present:
            self.broken.append(f"{state.suspicion}; everybody is there: trying again")
            return
        worst, is_guilty = suspicions.worst(present)
        if not is_guilty and (len(present) == 1 or not state.held):
            self.end(False, f"{MAX_TRIES} exchanges in a row broke, and on every member by itself: {state.suspicion}")
            return
        name = state.workers[worst].name
        why = f"{name} cannot be reached by the others ({MAX_TRIES} exchanges in a row broke): {state.suspicion}"
        self.put(suspicions=Suspicions())
        self.evict(state.workers[worst], why)
        self.lose(worst, why)

    # -- what follows --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Announce what the new situation asks for: at once after a loss, else when everybody is ready for it."""
        if self.state.ended is None and self.broken:
            self.go_on_without()
        if self.state.ended is None and self.state.finishing:
            self.keep_the_door_closed()
        if self.state.ended is None and not self.finish():
            self.plan()
        if self.state.ended is None:
            self.turn_away()
        if self.state.ended is None and self.drained:
            self.reasons.append(f"{listed(self.drained)} will leave")

    def go_on_without(self) -> None:
        state = self.state
        why = "; ".join(self.broken)
        survivors = self.holders()
        fresh = [w.worker_id for w in self.workers(_S.ADMITTED) if w.worker_id in state.members]
        # Before the first step is done nothing is lost with the state: whoever is left begins (again).
        lost_all = not survivors and state.held and not (fresh and state.committed < 0)
        if lost_all:
            if state.stopping:
                return
            if state.finishing or self.has_come_to_an_end():
                self.put(finishing=True)
                for newcomer in self.workers(_S.ADMITTED):
                    self.dismiss(newcomer, "the run has finished its training")
                return
            if state.committed < 0 and any(not w.draining for w in self.workers(_S.ORDERED, _S.STARTING, _S.READY)):
                self.put(held=False)
                self.announce([], f"{why}; no step was done, so the run begins again", immediate=True)
                return
            self.end(False, f"{why}; no worker that holds the run's state is left")
            return
        if not survivors:
            self.announce(fresh, why, immediate=True)
            return
        for worker_id in fresh:
            newcomer = self.worker(worker_id, state=_S.READY)
            if newcomer.draining:  # asked to leave before it had taken its generation
                self.dismiss(newcomer, "drained before it was admitted")
            elif newcomer.num_unreached >= MAX_UNREACHED:
                self.send_away(newcomer)
        self.announce(survivors, why, immediate=True)

    def has_come_to_an_end(self) -> bool:
        """Whether more than one worker has ended the training at the same step, or the only member has."""
        state = self.state
        for worker in self.workers(_S.FINISHED):
            left = state.leaving.get(worker.worker_id)
            if left is None:
                continue
            others = [place for i, place in state.leaving.items() if i != worker.worker_id and not place.goes_on]
            is_alone = (worker.worker_id,) in (state.members, state.before)
            if is_alone or any((left.phase, left.step) == (place.phase, place.step) for place in others):
                return True
        return False

    def keep_the_door_closed(self) -> None:
        """Dismiss who is not a member yet, also a machine's workers that come when the first has finished already."""
        late = self.workers(_S.ORDERED, _S.STARTING, _S.READY)
        if not self.moved():
            late += [w for w in self.workers(_S.ADMITTED) if w.worker_id not in self.state.before]
        for newcomer in late:
            self.dismiss(newcomer, "the run has finished its training")

    def finish(self) -> bool:
        """End the run if there is nothing left to do."""
        state = self.state
        alive = any(worker.state in ALIVE for worker in state.workers.values())
        if state.stopping and not (state.held and self.workers(_S.HOLDING)):
            self.end(True, state.stopping)
        elif alive:
            return False
        elif self.workers(_S.FINISHED):
            self.end(True, "finished")
        elif state.held and not state.members:
            self.end(True, "all workers have left")
        elif state.workers:
            self.end(False, f"no worker is left: {'; '.join(self.reasons) or 'all have gone'}")
            self.reasons = self.reasons[-1:]
        return self.state.ended is not None

    def plan(self) -> None:
        """Announce a planned generation, if there is reason and everybody has taken the one before."""
        state, policy = self.state, self.state.policy
        if state.finishing or not self.taken():
            return
        waiting = self.workers(_S.READY)
        if doubted := [
            w.info for w in waiting if w.num_unreached and w.info
        ]:  # one machine at a time: which one is it?
            waiting = [w for w in waiting if w.info and w.info.host == doubted[0].host]
        ready = [w.worker_id for w in waiting]
        if not state.held and not state.members:
            # Whoever will not come any more is not waited for.
            coming = self.workers(_S.ORDERED, _S.STARTING)
            enough = len(ready) + len(self.workers(_S.FINISHED)) >= policy.start
            if ready and (enough or (not coming and len(ready) >= policy.minimum)):
                self.announce(ready[: policy.maximum], "all are ready", immediate=False)
            return
        if state.stopping:
            if state.members:
                self.announce([], state.stopping, immediate=False)
            return
        holding = self.workers(_S.HOLDING)
        staying = [w.worker_id for w in holding if not w.draining]
        admitted = ready[: max(policy.maximum - len(staying), 0)]
        if not staying and self.workers(_S.ORDERED, _S.STARTING, _S.READY):
            staying = [w.worker_id for w in holding]  # until a newcomer has taken over the state
        want = staying + admitted
        joins = [i for i in want if i not in state.members]
        leaves = [i for i in state.members if i not in want and state.workers[i].state is _S.HOLDING]
        enough = len(want) >= policy.minimum
        paused = state.notice is not None and state.notice.paused
        if leaves or (enough and (joins or paused)):
            words = [f"{listed(joins)} {'joins' if len(joins) == 1 else 'join'}"] if joins else []
            words += [f"{listed(leaves)} {'leaves' if len(leaves) == 1 else 'leave'}"] if leaves else []
            self.drained = [i for i in self.drained if i not in leaves]
            self.announce(want, ", ".join(words) or "enough workers are there again", immediate=False)

    def announce(self, worker_ids: Iterable[str], why: str, *, immediate: bool) -> None:
        """Make the next generation and tell everybody whom it concerns."""
        state = self.state
        infos = _in_order(state.workers[i].info for i in worker_ids)
        fewer = 0 < len(infos) < state.policy.minimum
        generation = max(state.generation, state.unknown) + 1
        if fewer:
            reason = f"{why}; paused: {len(infos)} of at least {count(state.policy.minimum, 'worker')}"
        elif not infos:
            reason = why
        else:
            reason = f"{why}; generation {generation} with {count(len(infos), 'worker')}"
        new = [state.workers[info.worker_id] for info in infos if info.worker_id not in state.members]
        notice = Notice(
            generation=generation,
            members=infos,
            immediate=immediate,
            paused=fewer,
            reason=reason,
            warnings=[worker.warning for worker in new if worker.warning],
        )
        concerned = {*state.members, *state.before, *(info.worker_id for info in infos)}
        self.put(
            notice=notice,
            before=() if immediate else state.members,
            suspected_at=None,
            suspicions=dataclasses.replace(state.suspicions, reports={}),
            unreached=False,
        )
        for info in infos:
            if state.workers[info.worker_id].state is _S.READY:
                self.worker(info.worker_id, state=_S.ADMITTED)
        if not any(known.startswith(reason) for known in self.reasons):
            # What was broken comes before what is done about it, what was asked for before what follows from it.
            self.reasons.insert(0 if immediate else len(self.reasons), reason)
        for worker_id in sorted(concerned, key=number_of):
            if state.workers[worker_id].state in (_S.READY, _S.ADMITTED, _S.HOLDING, _S.ASIDE):
                self.send(worker_id, notice)


def _check_protocol(name: str, protocol: int) -> None:
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"{name} speaks protocol {protocol} and the head {PROTOCOL}; install the same version of unisono on all "
            "machines"
        )


def _in_order(found: Iterable[MemberInfo | None]) -> list[MemberInfo]:
    """Members of one host stand together; hosts and members in the order of their worker numbers."""
    infos = sorted((info for info in found if info is not None), key=lambda info: number_of(info.worker_id))
    hosts = list(dict.fromkeys(info.host for info in infos))
    return sorted(infos, key=lambda info: hosts.index(info.host))
