"""Heads, agents and links as values: whatever is cut, killed or mended in any order, the rules of failover hold.

The world below has the machines of a run with their agents, and a worker on each. It drives the rules of
`unisono.decisions` (the membership table, `Followed`, `Undelivered`, `verdict`) and nothing else: no processes, no
clock. Messages between two machines are delivered in their order, one by one, as long as the way is open; an event that
closes a way loses what is on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from unisono.core.following import GONE_S, Absence, Followed, StaleHead, Undelivered
from unisono.core.messages import (
    AgentHello,
    Heads,
    HeadSnapshot,
    Hello,
    Holding,
    Kept,
    Lost,
    MemberInfo,
    Message,
    Notice,
    Proposal,
    Ready,
    Start,
    StepDone,
)
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.sides import Rank, Standpoint, merged
from unisono.core.sides import verdict as answer_to
from unisono.membership import Event, Lags, Send, State, Tick, TookOver, agent_name, heirs, holders, seat_of, step
from unisono.membership.roster import ALIVE, WorkerState, resumed

AWAY_S = 5.0
NEVER_S = 1e9
SOON_S = 1.5
"""After so long, a worker whose connection has closed is lost."""
Sent = tuple[str, Message]
"""To whom, and what."""


@dataclass
class Head:
    """A head on a machine."""

    machine: int
    state: State
    number: int = 0
    versions: dict[int, State] = field(default_factory=dict)
    undelivered: Undelivered[Sent] = field(default_factory=Undelivered)
    lines: dict[str, int] = field(default_factory=dict)
    """Agent or worker -> its machine."""
    stand: Standpoint = field(default_factory=lambda: Standpoint(Rank.of(-1, 0, "")))
    is_alive: bool = True

    @property
    def seat(self) -> str:
        return seat_of(self.state)

    def standpoint(self) -> Standpoint:
        return msgspec.structs.replace(self.stand, rank=Rank.of(self.state.committed, self.state.term, self.seat))


@dataclass
class Machine:
    """An agent and its worker."""

    number: int
    followed: Followed = field(default_factory=Followed)
    states: dict[bytes, State] = field(default_factory=dict)
    """What the versions that it holds mean."""
    agent_id: str = ""
    branch: str = ""
    head: Head | None = None
    """The head that it is connected to."""
    absence: Absence | None = None
    is_alive: bool = True
    is_fresh: bool = False
    workers: dict[str, Worker] = field(default_factory=dict)
    known: list[int] = field(default_factory=list)
    heads: dict[int, str] = field(default_factory=dict)
    """Term -> the head of this term that it has followed, since it has joined anew."""

    def forget(self) -> None:
        """It is to join another side of the run."""
        self.workers.clear()
        self.heads.clear()
        self.followed, self.branch, self.is_fresh = Followed(), "", True


@dataclass
class Worker:
    worker_id: str
    branch: str = ""
    generation: int = 0
    done: int = -1
    """The last step that it has done."""
    acted_on: set[tuple[str, int]] = field(default_factory=set)
    """Generations that it has entered, with the head that made them."""


class World:
    """Machines, the ways between them, and the heads."""

    def __init__(self, num_machines: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.machines = [Machine(number) for number in range(num_machines)]
        self.blocked: set[tuple[int, int]] = set()
        self.heads: list[Head] = []
        self.num_takeovers = self.num_merges = 0
        settings = RunSettings(head_away_s=AWAY_S, heartbeat_timeout_s=NEVER_S, hang_s=NEVER_S)
        first = Head(0, State(policy=Policy(start=1, maximum=1), settings=settings, head="h0"))
        self.heads.append(first)
        self.machines[0].known = [0]
        for machine in self.machines:
            machine.known = [0]
            self.connect(machine, first)
        self.settle()

    # -- the network ---------------------------------------------------------------------------------

    def reaches(self, a: int, b: int) -> bool:
        """Whether two machines can talk: a connection needs both directions."""
        return a == b or not {(a, b), (b, a)} & self.blocked

    def head_at(self, number: int) -> Head | None:
        return next((head for head in self.heads if head.is_alive and head.machine == number), None)

    def break_lines(self) -> None:
        """Connections whose way is closed, or whose end is gone, break on both ends."""
        for head in self.heads:
            for name, number in list(head.lines.items()):
                machine = self.machines[number]
                is_whole = machine.is_alive and self.reaches(head.machine, number)
                if head.is_alive and is_whole and (machine.head is head):
                    continue
                head.lines.pop(name, None)
                if machine.head is head:
                    machine.head, machine.absence = None, Absence(self.now)
                if head.is_alive and name in head.state.agents:
                    self.happens(head, name, Lost(reason="broke"))
                if head.is_alive and name in head.state.workers:
                    self.lose(head, name)

        for head in self.alive():
            for worker_id, worker in head.state.workers.items():
                if worker.state in ALIVE and worker.info is not None and self.worker(head, worker_id) is None:
                    self.lose(head, worker_id)  # it is silent
            self.happens(head, "", Tick())

    def lose(self, head: Head, worker_id: str) -> None:
        """The head finds that a worker is silent."""
        self.happens(head, worker_id, Lost())
        self.happens(head, "", Tick(), at=self.now + SOON_S)

    # -- heads ---------------------------------------------------------------------------------------

    def happens(self, head: Head, source: str, message: object, at: float | None = None) -> None:
        before = head.state
        head.state, actions, *_ = step(before, Event(source, message), self.now if at is None else at)  # type: ignore[arg-type]
        head.number += 1
        head.versions[head.number] = head.state
        for agent_id in heirs(head.state):
            if agent_id in head.lines:
                self.hold(head, agent_id)
        if head.state.branch != before.branch:
            heads = Heads(branch=head.state.branch_name)
            told: list[Sent] = [(name, heads) for name in (*head.state.agents, *head.state.workers)]
            head.undelivered = head.undelivered.after(head.number, told, self.now)
        sends = [(action.to, action.message) for action in actions if isinstance(action, Send)]
        if sends:
            head.undelivered = head.undelivered.add(head.number, sends, self.now)
        self.deliver(head)

    def hold(self, head: Head, agent_id: str) -> None:
        """An heir gets the newest version, and its answer arrives: sometimes later, with a later version."""
        if self.rng.random() < 0.3:
            return
        machine = self.machines[head.lines[agent_id]]
        data = f"{head.state.head}.{head.number}".encode()
        snapshot = HeadSnapshot(
            term=head.state.term,
            number=head.number,
            state=data,
            successor=head.seat,
            heirs=list(head.state.heirs),
            holders=holders(head.state),
        )
        machine.followed, answer = machine.followed.keep(snapshot)
        machine.states[data] = head.versions[head.number]
        assert answer == Kept(term=snapshot.term, number=snapshot.number)
        head.undelivered = head.undelivered.hold(agent_id, head.number)

    def deliver(self, head: Head) -> None:
        ready, head.undelivered = head.undelivered.release(head.state.heirs, self.now)
        for name, message in ready:
            if name in head.lines:
                self.receive(head, name, message)

    def receive(self, head: Head, name: str, message: Message) -> None:
        machine = self.machines[head.lines[name]]
        if isinstance(message, Heads) and name == machine.agent_id:
            machine.branch = message.branch
        elif isinstance(message, Heads) and name in machine.workers:
            machine.workers[name].branch = message.branch
        elif isinstance(message, Start):
            for worker_id in message.worker_ids:
                if worker_id not in machine.workers:
                    machine.workers[worker_id] = Worker(worker_id)
        elif isinstance(message, Notice) and name in machine.workers:
            worker = machine.workers[name]
            if message.generation > worker.generation:
                worker.generation = message.generation
                worker.acted_on.add((head.state.head, message.generation))

    # -- agents --------------------------------------------------------------------------------------

    def connect(self, machine: Machine, head: Head) -> bool:
        """An agent says hello, and then its workers; returns whether the head has taken it."""
        hello = AgentHello(
            host=f"m{machine.number}",
            pid=1,
            num_workers=1,
            primary=machine.number == 0,
            agent_id=machine.agent_id,
            url=f"{machine.number}",
            branch=machine.branch,
            fresh=machine.is_fresh,
        )
        if not hello.fresh and not head.state.is_own(hello.branch):
            return False  # `Foreign`
        try:
            machine.followed = machine.followed.learn(head.state.term)
        except StaleHead:
            return False
        of_term = machine.heads.setdefault(head.state.term, head.state.head)
        assert of_term == head.state.head, "an agent follows one head of a term"
        name = agent_name(head.state, hello)
        head.lines[name] = machine.number
        machine.head, machine.absence, machine.agent_id = head, None, name
        machine.branch, machine.is_fresh = head.state.branch_name, False
        self.happens(head, name, hello)
        machine.known = list(dict.fromkeys([*(int(a.url) for a in head.state.agents.values()), *machine.known]))
        return True

    def talk(self, machine: Machine) -> None:
        """The workers of a machine connect to the head that their agent follows, and get on."""
        head = machine.head
        if head is None or not head.is_alive:
            return
        for worker in list(machine.workers.values()):
            known = head.state.workers.get(worker.worker_id)
            if known is not None and known.state not in ALIVE:
                del machine.workers[worker.worker_id]  # it is hung up on, and ends
                continue
            if worker.worker_id not in head.lines:
                head.lines[worker.worker_id] = machine.number
                info = MemberInfo(worker_id=worker.worker_id, host=f"m{machine.number}", pid=1, device="cpu")
                hello = Hello(info=info, fingerprint={}, generation=worker.generation, branch=worker.branch)
                self.happens(head, worker.worker_id, hello)
                worker.branch = head.state.branch_name
            state = head.state.workers[worker.worker_id].state
            if state is WorkerState.STARTING:
                self.happens(head, worker.worker_id, Ready(phase=0))
            elif (
                state in (WorkerState.ADMITTED, WorkerState.HOLDING) and 0 < worker.generation <= head.state.generation
            ):
                self.happens(head, worker.worker_id, Holding(generation=worker.generation))

    def look_for_head(self, machine: Machine) -> None:
        """One attempt of an agent that has lost its head."""
        assert machine.absence is not None
        snapshot = machine.followed.snapshot
        places = [number for number in machine.known if number != machine.number or self.head_at(number)]
        was = self.machines[machine.known[0]]
        for number in places:
            head = self.head_at(number)
            if head is None or not self.reaches(machine.number, number):
                continue
            if self.connect(machine, head):
                return
            if snapshot is None or machine.agent_id not in snapshot.heirs or head.state.committed >= self.done(machine):
                self.join_anew(machine, head)
                return
        last = self.head_of(machine)
        is_refused = last is not None and self.reaches(machine.number, last) and not self.machines[last].is_alive
        machine.absence = machine.absence.tried(is_refused, self.now)
        assert was is not None
        is_due = machine.followed.may_start(
            machine.agent_id,
            machine.absence,
            "go-on",
            away_s=AWAY_S,
            has_majority=False,
            has_workers=bool(machine.workers),
            now=self.now,
        )
        if is_due:
            self.take_over(machine)

    def head_of(self, machine: Machine) -> int | None:
        """The machine of the head that an agent has followed."""
        snapshot = machine.followed.snapshot
        if snapshot is None:
            return None
        agent = machine.states[snapshot.state].agents.get(snapshot.successor)
        return int(agent.url) if agent is not None else None

    def done(self, machine: Machine) -> int:
        return max((worker.done for worker in machine.workers.values()), default=-1)

    def take_over(self, machine: Machine) -> None:
        snapshot = machine.followed.snapshot
        assert snapshot is not None
        self.num_takeovers += 1
        machine.followed = machine.followed.learn(machine.followed.term + 1)
        name = f"h{len(self.heads)}"
        term = machine.followed.term
        before = machine.states[snapshot.state]
        state = resumed(before, term, self.now, seat=machine.agent_id, head=name, branch=machine.branch)
        head = Head(machine.number, state)
        self.heads.append(head)
        self.happens(head, "", TookOver(before=seat_of(before)))
        assert self.connect(machine, head)

    def join_anew(self, machine: Machine, head: Head) -> None:
        machine.forget()
        if self.reaches(machine.number, head.machine) and head.is_alive:
            assert self.connect(machine, head)

    # -- what may happen -----------------------------------------------------------------------------

    def work(self) -> None:
        """A generation whose members have all entered it does a step."""
        for head in self.heads:
            members = [self.worker(head, worker_id) for worker_id in head.state.members] if head.is_alive else []
            entered = [
                worker for worker in members if worker is not None and worker.generation == head.state.generation
            ]
            if members and len(entered) == len(members):
                ahead = {worker.done for worker in entered if worker.done >= 0}
                assert max(ahead, default=0) - min(ahead, default=0) <= 1, "members of two sides in one generation"
                done = max(ahead, default=-1) + 1
                for worker in entered:
                    worker.done = done
                self.happens(head, entered[0].worker_id, StepDone(step=done, seconds=0.1))

    def worker(self, head: Head, worker_id: str) -> Worker | None:
        for machine in self.machines:
            if machine.is_alive and machine.head is head and worker_id in machine.workers:
                return machine.workers[worker_id]
        return None

    def meet(self) -> None:
        """Heads look for others at the addresses of lost machines; the answer may be lost."""
        for head in list(self.heads):
            lost = [int(agent.url) for agent in head.state.absent.values() if agent.wanted]
            for number in lost:
                other = self.head_at(number)
                if not head.is_alive or other is None or other is head or not self.reaches(head.machine, number):
                    continue
                if head.standpoint().gives_way_to:
                    continue
                head.stand = msgspec.structs.replace(head.standpoint(), is_asking=True)
                proposal = Proposal(
                    run_id="x",
                    agent_id=head.seat,
                    term=head.state.term,
                    step=head.state.committed,
                    url=str(head.machine),
                )
                other.stand, answer = answer_to(other.standpoint(), proposal)
                is_heard = self.rng.random() < 0.8
                head.stand = merged(head.standpoint(), str(other.machine), answer if is_heard else None)
                self.num_merges += 1
                for each in (head, other):
                    self.move(each)
                assert head.is_alive or other.is_alive, "of two heads that meet one goes on"

    def move(self, head: Head) -> None:
        """A head that gives way sends its machines to the other one, and ends."""
        if not head.stand.gives_way_to or not head.is_alive:
            return
        head.is_alive = False
        there = self.head_at(int(head.stand.gives_way_to))
        for machine in self.machines:
            if machine.head is head:
                machine.head, machine.absence = None, Absence(self.now)
                machine.known = list(dict.fromkeys([int(head.stand.gives_way_to), *machine.known]))
                machine.forget()
                if there is not None and self.reaches(machine.number, there.machine):
                    self.connect(machine, there)

    def cut(self) -> None:
        side = {m.number for m in self.machines if self.rng.random() < 0.5}
        is_one_way = self.rng.random() < 0.3
        for a in side:
            for b in {m.number for m in self.machines} - side:
                self.blocked |= {(a, b)} if is_one_way else {(a, b), (b, a)}

    def mend(self) -> None:
        self.blocked.clear()

    def kill(self) -> None:
        """A machine dies, if others are left that follow the same head and hold its state."""
        for machine in self.rng.sample(self.machines, len(self.machines)):
            head = machine.head
            if not machine.is_alive or head is None:
                continue
            others = [
                other
                for other in self.machines
                if other is not machine and other.is_alive and other.head is head and self.may_follow(other, head)
            ]
            if others:
                machine.is_alive, machine.head = False, None
                machine.workers.clear()
                if (own := self.head_at(machine.number)) is not None:
                    own.is_alive = False
                return

    def may_follow(self, machine: Machine, head: Head) -> bool:
        """Whether a machine starts the next head after this one: it is an heir, and holds the run's newest state."""
        snapshot = machine.followed.snapshot
        is_heir = snapshot is not None and machine.agent_id in snapshot.heirs and machine.agent_id in snapshot.holders
        return is_heir and any(worker.done == head.state.committed for worker in machine.workers.values())

    def lag(self) -> None:
        for head in self.heads:
            if head.is_alive and (found := heirs(head.state)):
                self.happens(head, self.rng.choice(found), Lags())

    def settle(self, rounds: int = 1) -> None:
        """Time passes, and what can arrive arrives."""
        for _ in range(rounds):
            self.now += GONE_S
            self.break_lines()
            for machine in self.machines:
                if machine.is_alive and machine.head is None and machine.absence is not None:
                    self.look_for_head(machine)
            for head in self.heads:
                if head.is_alive:
                    for agent_id in head.state.heirs:
                        if agent_id in head.lines:
                            self.hold(head, agent_id)
                        elif agent_id in head.state.agents:
                            self.happens(head, agent_id, Lags())
                    self.deliver(head)
            for machine in self.machines:
                if machine.is_alive:
                    self.talk(machine)
            self.work()
            self.check()

    # -- what must hold ------------------------------------------------------------------------------

    def check(self) -> None:
        for machine in self.machines:
            head = machine.head
            if not machine.is_alive or head is None:
                continue
            for worker in machine.workers.values():
                known = head.state.workers.get(worker.worker_id)
                if known is None or known.state not in ALIVE or worker.worker_id not in head.lines:
                    continue
                newest = max((generation for _, generation in worker.acted_on), default=0)
                assert newest <= max(head.state.generation, head.state.unknown), (
                    "a decision that the head does not know"
                )

    def alive(self) -> Iterator[Head]:
        return (head for head in self.heads if head.is_alive)


@pytest.mark.parametrize("num_machines", [2, 3, 5])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_cut_or_killed_one_head_goes_on_in_the_end(num_machines: int, seed: int) -> None:
    world = World(num_machines, seed)
    world.settle(5)
    before = max(head.state.committed for head in world.alive())
    assert before >= 0
    for _ in range(40):
        world.rng.choice([world.cut, world.cut, world.mend, world.kill, world.lag, world.meet, world.meet])()
        world.settle(world.rng.randrange(1, 12))
    world.mend()
    for _ in range(30):
        world.meet()
        world.settle(2)
    assert len(list(world.alive())) == 1, "one head is left"
    (head,) = world.alive()
    done = head.state.committed
    world.settle(10)
    assert head.state.committed > done >= before, "and its run goes on"
    assert all(machine.head is head for machine in world.machines if machine.is_alive)


def test_these_worlds_are_not_calm() -> None:
    """Heads take over and sides meet in them, so the claims above are about something."""
    takeovers = merges = 0
    for seed in range(10):
        world = World(3, seed)
        for _ in range(40):
            world.rng.choice([world.cut, world.mend, world.kill, world.meet])()
            world.settle(8)
        takeovers += world.num_takeovers
        merges += world.num_merges
    assert takeovers > 10
    assert merges > 10
