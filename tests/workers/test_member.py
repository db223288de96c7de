"""A worker's side of the connection to the head, with a head that does what the test says."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from typing import NoReturn, TypeVar

import msgspec
import pytest
import torch

from tests.pure.test_journal import evaluation, step
from tests.waiting import WAIT_S
from unisono.cluster.worker.connection import MOST_STEPS, RETRY_S
from unisono.cluster.worker.member import Member
from unisono.core.errors import DeadlineExceeded
from unisono.core.events import Announcement, EvaluationFinished, StepFinished
from unisono.core.messages import (
    Beat,
    Happened,
    Hello,
    Holding,
    MemberInfo,
    Message,
    Notice,
    StepDone,
    Suspect,
    Welcome,
    decode,
    encode,
)
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec, WorkerSpec
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.wire import wire_of_one
from unisono.engine.rounds import Report
from unisono.engine.rounds.team import HeadTeam, Team

M = TypeVar("M", bound=Message)
INFO = MemberInfo(worker_id="w0", host="lab", pid=1, device="cpu")
CPU = torch.device("cpu")


class Connection:
    """What the test holds of one connection: it takes what the worker says, and says what the test wants."""

    def __init__(self) -> None:
        self.said: queue.Queue[Message] = queue.Queue()
        self.to_worker: queue.Queue[Message | None] = queue.Queue()
        self.made_at = time.monotonic()
        self._bell, self.sock = socket.socketpair()

    def tell(self, message: Message | None) -> None:
        """None closes the connection."""
        self.to_worker.put(message)
        self._bell.send(b"x")

    def hears(self, kind: type[M]) -> M:
        """The next message of this kind."""
        while not isinstance(found := self.said.get(timeout=WAIT_S), kind):
            pass
        return found

    # What the worker sees of it (`unisono.cluster.worker.link.Link`):
    address = "127.0.0.1"
    wants_to_write = False

    def put(self, data: bytes) -> None:
        self.said.put(decode(data))

    def push(self) -> None:
        pass

    def take(self) -> list[bytes]:
        found = []
        while not self.to_worker.empty():
            self.sock.recv(1)
            message = self.to_worker.get()
            if message is None:
                raise ConnectionError("the head closed the connection")
            found.append(encode(message))
        return found

    def close(self) -> None:
        self.sock.close()
        self._bell.close()


class Connections(queue.Queue[Connection]):
    """The connections that are made, one after the other."""

    answer: Message | None = Welcome(run_id="x", heartbeat_s=0.01)
    """What the next ones begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at = time.monotonic()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    made = Connections()

    def connect(url: str, token: str) -> Connection:
        connection = Connection()
        made.put(connection)
        connection.tell(made.answer)
        return connection

    monkeypatch.setattr("unisono.cluster.worker.link.Link.dial", connect)
    return made


@pytest.fixture
def member(connections: queue.Queue[Connection]) -> Iterator[Member]:
    spec = WorkerSpec(head="ws://nowhere:1", worker_id="w0", host="lab")
    with contextlib.closing(Member(spec, INFO, {}).connect()) as found:
        yield found


def notice(generation: int) -> Notice:
    return Notice(generation=generation, members=[INFO], immediate=True)


def test_a_suspicion_is_said_again_until_there_is_an_answer(
    connections: queue.Queue[Connection], member: Member
) -> None:
    """The head that has heard it may die with it, and everybody waits for what it would have decided."""
    first = connections.get(timeout=WAIT_S)
    member.holding(1)
    member.suspect(1, "timed out", ["w1"])
    said = first.hears(Suspect)
    first.tell(None)
    second = connections.get(timeout=WAIT_S)
    assert isinstance(second.hears(Hello), Hello)
    assert second.said.get(timeout=WAIT_S) == Holding(generation=1)
    assert second.said.get(timeout=WAIT_S) == said
    second.tell(notice(2))
    assert member.wait_notice(1, WAIT_S).generation == 2
    second.tell(None)
    third = connections.get(timeout=WAIT_S)
    assert third.hears(Holding) == Holding(generation=1)
    assert not isinstance(third.said.get(timeout=WAIT_S), Suspect)


def test_events_that_were_not_sent_follow_in_their_order(connections: queue.Queue[Connection], member: Member) -> None:
    """A sink that has got the newest one would take the older ones for repeated."""
    first = connections.get(timeout=WAIT_S)
    events = [Announcement(text=f"step {number}", number=number) for number in range(4)]
    member.happened(events[0])
    first.hears(Happened)
    first.wants_to_write = True  # nothing can be sent any more
    for event in events[1:]:
        member.happened(event)
    first.tell(None)
    second = connections.get(timeout=WAIT_S)
    assert [second.hears(Happened).events[0].number for _ in range(3)] == [1, 2, 3]


def test_a_suspicion_names_those_who_were_waited_for(connections: queue.Queue[Connection], member: Member) -> None:
    def build(notice: Notice, rank: int) -> NoReturn:
        raise AssertionError("nobody has entered a generation")

    team = HeadTeam(member, build, build)
    team.suspect(DeadlineExceeded("waited 300 s for worker w1", ["w1"]))
    heard = connections.get(timeout=WAIT_S).hears(Suspect)
    assert heard == Suspect(generation=0, reason="waited 300 s for worker w1", peers=["w1"])


def test_a_team_knows_the_parts_of_its_members(connections: Connections) -> None:
    """Its own from the head's answer to its hello, those of all from the notice of each generation."""
    connections.answer = Welcome(run_id="x", heartbeat_s=0.01, part=1)
    others = [MemberInfo(worker_id=f"w{part + 1}", host="lab", pid=2, device="cpu", part=part) for part in (2, 3)]
    members = [msgspec.structs.replace(INFO, part=1), *others]
    with contextlib.closing(Member(WorkerSpec(head="ws://nowhere:1", worker_id="w0"), INFO, {}).connect()) as member:
        team = HeadTeam(member, lambda notice, rank: Alone(CPU), lambda notice, rank: wire_of_one(CPU))
        assert (member.part, team.part, team.parts) == (1, 1, ())
        connections.get(timeout=WAIT_S).tell(Notice(generation=1, members=members, immediate=True))
        assert member.wait_notice(0, WAIT_S).generation == 1
        team.join(0, Report(fresh=True, phase=0, step=0, round=0))
        assert (team.rank, team.parts) == (0, (1, 2, 3))
    alone = Team(CPU)
    assert (alone.part, alone.parts) == (0, (0,))


def test_a_head_that_gives_a_worker_another_part_loses_it(connections: Connections, member: Member) -> None:
    """The worker has built one part of the model, and cannot have another."""
    connections.answer = Welcome(run_id="x", heartbeat_s=0.01, part=2)
    connections.get(timeout=WAIT_S).tell(None)
    assert "part 2 of the model to this worker, which has part 0" in str(member.wait_ended(WAIT_S))


def test_a_heartbeat_names_the_samples_of_a_micro_batch_that_takes_long(
    connections: queue.Queue[Connection], member: Member
) -> None:
    """Who hangs in them cannot say so. They are asked for once, and not for each heartbeat or micro-batch."""
    asked: list[int] = []

    def samples() -> list[int]:
        asked.append(1)
        return list(range(100, 200))

    connection = connections.get(timeout=WAIT_S)
    member.progress.at(phase=0, step=4, microbatch=2, samples=samples)
    while not (beat := connection.hears(Beat)).samples:
        assert beat.seconds_at < WAIT_S
    assert (beat.step, beat.microbatch, beat.samples) == (4, 2, list(range(100, 109)))
    connection.hears(Beat)
    assert asked == [1]
    member.progress.at(phase=0, step=5, microbatch=-1)
    while (beat := connection.hears(Beat)).step == 4:
        pass
    assert beat.samples == []


def test_a_connection_that_is_closed_at_once_is_not_made_in_a_hot_loop(
    connections: Connections, member: Member
) -> None:
    for _ in range(3):
        connections.get(timeout=WAIT_S).tell(None)
    # The pauses count from where each attempt begins, which is before its connection is there.
    assert connections.get(timeout=WAIT_S).made_at - connections.begun_at >= 3 * RETRY_S


def test_a_worker_leaves_a_head_of_a_lower_term(connections: Connections, member: Member) -> None:
    """And says to the next which term it knows: a head that hears of a higher one ends itself."""
    first = connections.get(timeout=WAIT_S)
    assert first.hears(Hello).term == 0
    first.tell(Welcome(run_id="r1", heartbeat_s=0.01, term=2))
    while member.welcome.term != 2:
        first.hears(Beat)
    first.tell(None)
    stale = connections.get(timeout=WAIT_S)  # it answers as one of term 1
    assert stale.hears(Hello).term == 2
    assert connections.get(timeout=WAIT_S).hears(Hello).term == 2
    assert member.welcome.term == 2


def test_a_process_that_stood_still_did_not_hang(
    connections: queue.Queue[Connection], member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its heartbeat was not heard, the head knows of the silence; the worker itself is no later than before."""
    connection = connections.get(timeout=WAIT_S)
    member.progress.at(phase=0, step=3, microbatch=1)
    connection.hears(Beat)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 100.0)
    for _ in range(3):
        beat = connection.hears(Beat)
    assert isinstance(beat, Beat)
    assert beat.seconds_at < 50.0


def test_what_takes_connections_and_says_nothing_is_no_head(
    connections: Connections,
) -> None:
    """A relay, for example, that is still there when the machine behind it is not."""
    spec = WorkerSpec(
        head="ws://nowhere:1", worker_id="w0", host="lab", run=RunSpec(settings=RunSettings(head_away_s=0.3))
    )
    with contextlib.closing(Member(spec, INFO, {}).connect()) as member:
        connections.answer = None
        connections.get(timeout=WAIT_S).tell(None)
        stopped = member.wait_ended(WAIT_S)
        assert stopped is not None
        assert "has been away" in str(stopped)


def step_event(number: int) -> StepFinished:
    return step(number, number=number)


@pytest.fixture
def slow_beats(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a heartbeat nor the time lets steps go."""
    connections.answer = Welcome(run_id="x", heartbeat_s=1e6)
    monkeypatch.setattr("unisono.cluster.worker.connection.STEPS_S", 1e9)


def told(connection: Connection) -> list[Happened]:
    """What came about steps, until an evaluation."""
    found: list[Happened] = []
    while True:
        message = connection.said.get(timeout=WAIT_S)
        if isinstance(message, Happened) and isinstance(message.events[0], EvaluationFinished):
            return found
        if isinstance(message, Happened):
            found.append(message)


@pytest.mark.usefixtures("slow_beats")
def test_events_of_fast_steps_are_sent_together_and_before_what_follows(
    connections: queue.Queue[Connection], member: Member
) -> None:
    first = connections.get(timeout=WAIT_S)
    for number in range(3 * MOST_STEPS):
        member.happened(step_event(number))
    member.happened(msgspec.structs.replace(evaluation(96, right=1), number=96))
    messages = told(first)
    # The first heartbeat may have come in between.
    assert len(messages) <= 5
    steps = [each for message in messages for each in message.events]
    assert [each.number for each in steps] == list(range(3 * MOST_STEPS))


@pytest.mark.usefixtures("slow_beats")
def test_a_new_connection_repeats_the_steps_that_were_sent_together_last(
    connections: queue.Queue[Connection], member: Member
) -> None:
    """The head that has heard them may have died with them."""
    first = connections.get(timeout=WAIT_S)
    for _ in range(2):
        for number in range(MOST_STEPS + 3):
            member.happened(step_event(number))
        member.happened(msgspec.structs.replace(evaluation(40, right=1), number=40))
    told(first)
    said = told(first)
    assert len(said[-1].events) > 1
    first.tell(None)
    assert connections.get(timeout=WAIT_S).hears(Happened) == said[-1]


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.usefixtures("slow_beats")
def test_the_newest_step_is_told_before_what_follows_it(
    connections: queue.Queue[Connection], member: Member, *, tells: bool
) -> None:
    """What the head decides by the number of steps must not be decided by an old one."""
    first = connections.get(timeout=WAIT_S)
    for number in range(9):
        member.step_done(StepDone(step=number, seconds=0.1), tells=tells)
    member.suspect(1, "a cut cable")
    said: list[Message] = []
    while not (said and isinstance(said[-1], Suspect)):
        said.append(first.said.get(timeout=WAIT_S))
    done = [message.step for message in said if isinstance(message, StepDone)]
    assert done[-1] == 8
    assert len(done) <= 3, "the first, one with a heartbeat, and the newest"


def test_a_step_that_nobody_follows_is_sent_with_the_next_heartbeat(
    connections: queue.Queue[Connection], member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.cluster.worker.connection.STEPS_S", 1e9)
    member.happened(step_event(3))
    assert connections.get(timeout=WAIT_S).hears(Happened) == Happened(events=[step_event(3)])
