"""Rounds between real exchanges, and a scripted head: who has seen a commit and who has not, at a boundary."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
import torch

from tests.house.toys.toy_round import Norms
from tests.waiting import WAIT_S
from tests.workers.processes import Seat, Team
from tests.workers.static_team import AloneRun, StaticTeam
from unisono.cluster.worker.member import Member
from unisono.core.cadence import CheckpointReport, Position
from unisono.core.errors import PeerLost, StateLost
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.spec import WorkerSpec
from unisono.core.telemetry import StepTelemetry
from unisono.core.tree import Node
from unisono.engine.exchange import Exchange, Parcel, Share, combine
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.flat import FlatLayout
from unisono.engine.exchange.host import SharedMemory
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.exchange.wire import wire_of_one
from unisono.engine.rounds import Report, Reporter
from unisono.engine.rounds.admission import Admission
from unisono.engine.rounds.gradient import CommittedStep
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.team import HeadTeam
from unisono.engine.rounds.team import Team as RunTeam
from unisono.engine.state.packing import quick_digest
from unisono.engine.state.tracked import Tracked
from unisono.script.keeping import Keeper
from unisono.strategies.local.replica_states import Shelf
from unisono.strategies.local.replicas import check_held

CPU = torch.device("cpu")
NUM_LEAVES = 6
NUM_STEPS = 3
TIMEOUT_S = WAIT_S / 2


@dataclass
class Generation:
    members: list[str]
    paused: bool = False


class Script:
    """What the head says, known to all: a, b and c begin; c is lost when a has seen the commit of a step and b has not.

    Meanwhile the run was told to stop, or has too few members left, so that a halts at the next boundary.
    """

    def __init__(self, why: str) -> None:
        self.generations = {1: Generation(["a", "b", "c"], paused=why == "pause")}
        if why == "stop":
            self.generations[2] = Generation([])
        self.generations[3] = Generation(["a", "b"], paused=why == "pause")
        self.generations[4] = Generation(["a", "b"])


class ScriptedTeam(RunTeam):
    """A member of the generations of a script."""

    def __init__(self, name: str, script: Script, page: WorkerPage, pages: dict[str, str]) -> None:
        super().__init__(CPU)
        self.name, self.script, self.page, self.pages = name, script, page, pages
        self.is_begun = False
        self.met: list[list[tuple[int, str]]] = []

    def enter(self, generation: int) -> None:
        self.exchange.close()
        members = self.script.generations[generation].members
        self.generation, self.rank, self.size = generation, members.index(self.name), len(members)
        self.worker_ids, self.hosts = tuple(members), ("",) * len(members)
        addresses = [self.pages[member] for member in members]
        counters = Counters(self.page, addresses, self.rank, generation=generation, timeout_s=TIMEOUT_S)
        self.exchange = SharedMemory(counters)

    def meet(self, report: Report) -> list[Report]:
        letters = self.exchange.all_gather(msgspec.msgpack.encode(report))
        reports = [msgspec.msgpack.decode(letter, type=Report) for letter in letters]
        self.met.append([(each.round, each.kind) for each in reports])
        return reports

    def join(self, phase: int, report: Report) -> list[Report]:
        self.enter(1)
        return self.meet(report)

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        if self.name not in self.script.generations[3].members:
            raise lost
        assert self.generation == 1, f"{self.name} was lost again: {lost}"
        self.enter(3)
        return self.meet(report)

    def newest_generation(self) -> int:
        return 2 if 2 in self.script.generations and self.generation < 2 else 0

    def stops_at(self, generation: int) -> bool:
        return not self.script.generations[generation].members

    def paused(self) -> bool:
        return self.is_begun and self.script.generations[self.generation].paused  # it came within the first step

    def next_planned(self) -> int:
        return 4

    def switch(self, generation: int, report: Report) -> list[Report]:
        if generation < 4:
            return super().switch(generation, report)
        self.enter(generation)
        return self.meet(report)


def lose_after(members: Any, call: str, number: int) -> None:
    """Once, after the exchange of this number: it is done, and this member does not get to know."""
    original: Callable[..., Any] = getattr(members, call)
    count = 0

    def lost_once(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        result = original(*arguments)
        if count == number:
            raise PeerLost("c is gone")
        return result

    setattr(members, call, lost_once)


class Sum:
    """A step of slots that hold their number of leaves; ``before_commit`` is called on its first attempt."""

    kind, title, num_leaves = "step", "a step", NUM_LEAVES

    def __init__(self, members: Members, before_commit: Callable[[Plan], None] = lambda plan: None) -> None:
        self.members, self.before_commit = members, before_commit

    def first_plan(self) -> Plan:
        return even_plan(self.members.size, NUM_LEAVES)

    def begin(self, plan: Plan) -> None:
        pass

    def compute(self, plan: Plan) -> Iterator[object]:
        nodes = self.members.slots.nodes
        for node in plan.nodes[self.members.rank]:
            if node not in nodes:
                slot = nodes[node] = self.members.new_slot()
                slot.memory.zero_()
                slot.scalars[0] = float(min((node.index + 1) << node.level, NUM_LEAVES) - (node.index << node.level))
        yield from ()

    def combine(self, plan: Plan) -> CommittedStep:
        self.before_commit(plan)
        summed = self.members.sum(Share(NUM_LEAVES, plan.nodes, self.members.slots.nodes), StepTelemetry())
        self.members.slots.results.append(summed.slot)
        assert self.members.slots.layout is not None
        return CommittedStep(self.members, "", self.members.slots.layout, summed.digest, new_sums=False)

    def interrupt(self) -> list[Node]:
        return list(self.members.slots.nodes)

    def finish(self) -> None:
        pass


def take_part(seat: Seat, why: str) -> None:
    """Says the number of rounds that are over, and who met whom where."""
    name = "abc"[seat.rank]
    page = WorkerPage()
    seat.say(page.address)
    pages = seat.hear()
    script = Script(why)
    team, tracked = ScriptedTeam(name, script, page, pages), Tracked()
    rounds = Rounds(team, tracked, balance=False)
    keeper = Keeper(
        None, tracked=tracked, policy=None, resume="", anyway=(), also_anyway=(), command="", overwrite=False,
        device=CPU, threads=1,
    )  # fmt: skip
    assert Admission(rounds).join(0, {}, lambda: None)
    rounds.use_layout(FlatLayout([("p", torch.zeros(4))], []))

    def lose(plan: Plan) -> None:
        """It gives its part, and the loss comes before it has seen what became of it."""
        if name == "b" and team.generation == 1:
            copies = {node: slot.copy_to(team.exchange.slot()) for node, slot in rounds.members.slots.nodes.items()}
            telemetry = StepTelemetry(newest_generation=team.newest_generation())
            combine(team.exchange, Share(NUM_LEAVES, plan.nodes, copies), telemetry.pack())
            seat.hear()  # the others have
            raise PeerLost("c is gone")

    for step in range(NUM_STEPS):
        rounds.position = Position(phase=0, step=step, number=step, total=step, lines=0)
        keeper.boundary(rounds)
        team.is_begun = True
        for _ in rounds.play(Sum(rounds.members, lose)):
            pass
        if name != "b" and step == 0:
            seat.say("committed")
        rounds.members.release_results()
        if name == "c":
            break
    team.exchange.close()
    seat.say((rounds.number, team.met))
    seat.hear()  # others may still read this one's memory


@pytest.mark.parametrize("why", ["stop", "pause"])
def test_who_has_not_seen_the_commit_halts_where_the_others_do(why: str) -> None:
    """The others have begun to write a checkpoint: who comes after them must not begin a step instead."""
    with Team(3, take_part, why) as team:
        pages = {name: team.hear(rank) for rank, name in enumerate("abc")}
        for rank in range(3):
            team.say(rank, pages)
        assert (team.hear(0), team.hear(2)) == ("committed", "committed")
        team.say(1, "go on")
        (rounds_of_a, met_by_a), (rounds_of_b, met_by_b), _ = [team.hear(rank) for rank in range(3)]
    assert met_by_a == met_by_b
    # First b is a round behind; then it has begun what a had begun.
    assert met_by_a[1:3] == [[(1, "together"), (0, "step")], [(1, "together"), (1, "together")]]
    assert rounds_of_a == rounds_of_b == NUM_STEPS + 1


class Listener:
    """A `Member` that notes what it is told about waiting."""

    arithmetic = 0
    part = 0
    spec = WorkerSpec()

    def __init__(self) -> None:
        self.is_waiting = False
        self.progress = self

    def on_notice(self, callback: Callable[[Any], None]) -> None:
        pass

    def latest(self) -> None:
        return None

    def waiting(self, flag: bool) -> None:
        self.is_waiting = flag


def test_a_wait_within_a_wait_ends_only_itself() -> None:
    """Who waits for a disk in the middle of waiting for others is still not to blame."""
    listener = Listener()
    team = HeadTeam(cast(Member, listener), lambda notice, rank: Alone(CPU), lambda notice, rank: wire_of_one(CPU))
    with team.waiting():
        with team.waiting():
            assert listener.is_waiting
        assert listener.is_waiting
    assert not listener.is_waiting


@pytest.mark.parametrize("where", ["first_plan", "begin"])
def test_who_cannot_begin_a_round_is_in_none(where: str) -> None:
    """Its error is the script's, which may catch it and go on."""

    def fail(*_: object) -> None:
        raise ValueError("a round of the script's own")

    with AloneRun(seed=1) as run:
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)], batch_size=1, microbatches=1, max_steps=1):
            for batch in step:
                step.backward(model(batch).mean())

        def norms(rounds: Rounds) -> Norms:
            return Norms(rounds, list(model.parameters()), lambda index: None)

        def failing(rounds: Rounds) -> Norms:
            found = norms(rounds)
            setattr(found, where, fail)
            return found

        with pytest.raises(ValueError, match="a round of the script's own"):
            run.play(failing)
        assert run._rounds is not None
        assert run._rounds.report().title == ""
        assert len(run.play(norms).found) == 2


def test_what_a_member_holds_of_the_next_layout_waits_while_it_stands_by() -> None:
    """It is ahead, has frozen or thawed parameters since, and helps those behind to finish a step of the old ones."""
    old = FlatLayout([("a", torch.zeros(3))], [])
    new = FlatLayout([("a", torch.zeros(3)), ("b", torch.zeros(200))], [])
    team = RunTeam(CPU)
    rounds = Rounds(team, Tracked())
    rounds.use_layout(new)
    slot = team.exchange.slot()
    for place, view in enumerate(slot.gradients):
        view.fill_(float(place + 1))
    expected = bytes(slot.rows(0, new.num_rows).tolist())
    slots = rounds.members.slots
    slots.nodes = {Node(0, 0): slot}
    slots.bring(team.exchange, old)
    team.exchange.slot().memory.fill_(7)
    slots.bring(team.exchange, new)
    kept = slots.nodes[Node(0, 0)]
    assert kept.layout == new
    assert bytes(kept.rows(0, new.num_rows).tolist()) == expected
    assert team.exchange.slot() is not kept


class Threads:
    """An exchange between two threads, as far as a run that begins needs one."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank, self._barrier, self._box = rank, barrier, box

    def all_gather(self, data: bytes) -> list[bytes]:
        self._box[self.rank] = data
        self._barrier.wait()
        found = list(self._box)
        self._barrier.wait()
        return found

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        for parcel in parcels:
            if self.rank == parcel.source:
                self._box[parcel.source] = parcel.tensor.clone()
            self._barrier.wait()
            if self.rank in parcel.targets:
                parcel.tensor.copy_(self._box[parcel.source])
            self._barrier.wait()
        return 0


def _trained(num_steps: int) -> tuple[Tracked, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    tracked = Tracked()
    tracked.add({"model": model, "optimizer": optimizer})
    return tracked, optimizer


@pytest.mark.parametrize("phases", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_members_that_stand_at_different_phases_begin_together_where_the_checkpoint_is(phases: tuple[int, int]) -> None:
    """One has the models and went on, the other had lost the member that shared them: both get the whole state."""
    saved = copy.deepcopy(_trained(3)[0].state())
    place = Position(phase=1, step=5, number=9, total=9, lines=12)
    barrier, box = threading.Barrier(2, timeout=WAIT_S), [None, None]
    found: dict[int, tuple[int, str]] = {}

    def begin_at(rank: int, phase: int) -> None:
        tracked, _ = _trained(0)
        rounds = Rounds(StaticTeam(cast(Exchange, Threads(rank, barrier, box))), tracked)
        admission = Admission(rounds)
        for number in range(phase, 2):

            def begin(number: int = number) -> Position:
                (tracked.load if number == place.phase else tracked.load_models)(saved)
                return place

            assert admission.join(number, {}, begin) == (number == place.phase)
        found[rank] = (rounds.position.step, f"{quick_digest(tracked.compared()):016x}")

    threads = [threading.Thread(target=begin_at, args=(rank, phase)) for rank, phase in enumerate(phases)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracked, _ = _trained(0)
    tracked.load(saved)
    assert found == dict.fromkeys((0, 1), (5, f"{quick_digest(tracked.compared()):016x}"))


def test_what_a_member_says_about_checkpoints_is_said_while_it_counts_as_waiting() -> None:
    """It may wait for a disk before that, and must not be left aside for it."""
    waits: list[bool] = []

    class Waiting(RunTeam):
        is_waiting = False

        @contextlib.contextmanager
        def waiting(self) -> Iterator[None]:
            self.is_waiting = True
            yield
            self.is_waiting = False

    class Keeping(Reporter):
        def report(self) -> CheckpointReport:
            waits.append(team.is_waiting)
            return CheckpointReport()

    team = Waiting(CPU)
    rounds = Rounds(team, Tracked(), reporter=Keeping())
    rounds.use_layout(FlatLayout([("a", torch.zeros(3))], []))
    for _ in rounds.play(Sum(rounds.members)):
        pass
    assert waits == [True]


def test_the_error_of_a_lost_replica_names_what_the_run_can_go_on_from() -> None:
    class Reported(Reporter):
        def newest(self) -> str:
            return "the newest checkpoint, runs/a/checkpoints/step-12"

    members = Rounds(RunTeam(CPU), Tracked(), reporter=Reported()).members
    wanted = r"replica 1 .* Resume from the newest checkpoint, runs/a/checkpoints/step-12; "
    with pytest.raises(StateLost, match=wanted):
        check_held(members, {0: [0]}, Shelf({}, {}, {1: ("w1", "w2")}), [0, 1])
