"""Heartbeats that an agent reports for its workers: what a worker leaves, what the agent takes, and who speaks when."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.waiting import WAIT_S
from tests.workers.test_head_death import serving
from tests.workers.test_heirs import follower
from tests.workers.test_member import INFO, Connection, Connections
from unisono.cluster.machine.beats import BeatReporter
from unisono.cluster.worker.beatpage import NUM_SLOTS, BeatPage, BeatSlot, open_slot
from unisono.cluster.worker.member import Member
from unisono.core.messages import Beat, BeatOf, Beats, Hello, MemberInfo, Ready, Start, encode
from unisono.core.spec import WorkerSpec

pytestmark = pytest.mark.more

pytest_plugins = ["tests.workers.test_member"]
NOW = 12.5


def beat(progress: int = 1) -> Beat:
    return Beat(generation=1, phase=0, step=4, microbatch=2, progress=progress, waiting=True)


@pytest.fixture
def page() -> Iterator[BeatPage]:
    with contextlib.closing(BeatPage()) as found:
        yield found


def both_sides(page: BeatPage, index: int = 0) -> tuple[BeatSlot, BeatSlot]:
    """A slot as its worker and as the agent sees it."""
    worker, agent = open_slot(page.path, index), page.slot(index)
    assert worker is not None
    assert agent is not None
    return worker, agent


# -- a slot ------------------------------------------------------------------------------------------


def test_a_worker_relies_on_its_agent_from_the_second_heartbeat_on(page: BeatPage) -> None:
    worker, agent = both_sides(page)
    assert not worker.leave(b"first", NOW), "the agent has taken none yet"
    left = agent.read()
    assert left is not None
    assert (left.data, left.at) == (b"first", NOW)
    agent.take(left)
    assert worker.leave(b"second", NOW + 1)


def test_a_worker_whose_last_heartbeat_was_not_taken_speaks_for_itself(page: BeatPage) -> None:
    worker, agent = both_sides(page)
    worker.leave(b"first", NOW)
    left = agent.read()
    assert left is not None
    agent.take(left)
    assert worker.leave(b"second", NOW + 1)
    assert not worker.leave(b"third", NOW + 2)
    newest = agent.read()
    assert newest is not None
    assert newest.data == b"third"
    agent.take(newest)
    assert worker.leave(b"fourth", NOW + 3), "the agent is back"


def test_a_heartbeat_is_taken_once(page: BeatPage) -> None:
    worker, agent = both_sides(page)
    assert agent.read() is None
    worker.leave(b"first", NOW)
    left = agent.read()
    assert left is not None
    agent.take(left)
    assert agent.read() is None, "a worker that stands still leaves nothing new"


def test_a_heartbeat_that_is_half_written_is_not_read(page: BeatPage) -> None:
    worker, agent = both_sides(page)
    worker.leave(b"first", NOW)
    torn = agent._page
    at = torn.find(b"first")
    torn[at : at + 2] = b"xx"
    assert agent.read() is None


def test_a_replacement_begins_anew_in_the_slot_of_a_lost_worker(page: BeatPage) -> None:
    lost, agent = both_sides(page)
    lost.leave(b"of the lost worker", NOW)
    agent.clear()
    assert agent.read() is None
    worker, _ = both_sides(page)
    assert not worker.leave(b"of its replacement", NOW)
    left = agent.read()
    assert left is not None
    assert left.data == b"of its replacement"


def test_a_step_that_is_noted_is_seen_by_the_agent(page: BeatPage) -> None:
    worker, agent = both_sides(page, 3)
    assert agent.step == -1
    worker.note_step(0)
    worker.leave(b"x" * 64, 1.0)
    assert agent.step == 0
    worker.note_step(41)
    assert agent.step == 41
    agent.clear()
    assert agent.step == -1


def test_slots_do_not_touch_each_other(page: BeatPage) -> None:
    sides = [both_sides(page, index) for index in (0, 1, NUM_SLOTS - 1)]
    for number, (worker, _) in enumerate(sides):
        worker.leave(b"%d" % number * 900, NOW)
    for number, (_, agent) in enumerate(sides):
        left = agent.read()
        assert left is not None
        assert left.data == b"%d" % number * 900


def test_a_worker_without_a_slot_speaks_for_itself(page: BeatPage) -> None:
    assert open_slot(page.path, NUM_SLOTS) is None
    assert page.slot(NUM_SLOTS) is None
    assert open_slot("", 0) is None
    assert open_slot("/nowhere", 0) is None, "e.g. in a container that does not see its agent"
    worker, _ = both_sides(page)
    assert not worker.leave(b"x" * 1000, NOW), "a long one does not fit"


# -- the agent ---------------------------------------------------------------------------------------


def test_an_agent_reports_what_is_new_with_its_age_in_one_message(page: BeatPage) -> None:
    async def work() -> None:
        sides = {f"w{index}": both_sides(page, index) for index in range(3)}
        slots = {worker_id: agent for worker_id, (_, agent) in sides.items()}
        sent: list[Beats] = []

        def send(message: Beats) -> bool:
            sent.append(message)
            return True

        with contextlib.closing(BeatReporter(lambda: slots, send, WAIT_S)) as found:
            found.report()
            assert sent == [], "nothing to say"
            for worker_id in ("w0", "w2"):
                sides[worker_id][0].leave(encode(beat()), time.monotonic() - 2.0)
            sides["w1"][0].leave(b"no heartbeat", time.monotonic())
            found.report()
            found.report()
        assert [each.worker_id for each in sent[0].beats] == ["w0", "w2"]
        assert all(2.0 <= each.seconds_ago < 2.0 + WAIT_S and each.beat == beat() for each in sent[0].beats)
        assert len(sent) == 1
        assert sides["w0"][0].leave(encode(beat(2)), time.monotonic())
        assert not sides["w1"][0].leave(encode(beat(2)), time.monotonic())

    asyncio.run(work())


def test_what_an_agent_cannot_send_is_not_taken(page: BeatPage) -> None:
    async def work() -> None:
        worker, agent = both_sides(page)
        worker.leave(encode(beat()), time.monotonic())
        with contextlib.closing(BeatReporter(lambda: {"w0": agent}, lambda _: False, WAIT_S)) as found:
            found.report()
        assert not worker.leave(encode(beat(2)), time.monotonic())

    asyncio.run(work())


def test_an_agent_without_a_head_says_so(page: BeatPage) -> None:
    """`Following.report` is false before the connection and after it; in between the head hears of the workers."""

    async def story() -> None:
        async with serving(run_id="x") as (head, url):
            async with follower(url, primary=True) as agent:
                assert not agent.following.report(Beats(beats=[]))
                (worker_id,) = (await agent.hears(Start)).worker_ids
                info = MemberInfo(worker_id=worker_id, host="lab", pid=7, device="cpu")
                head.table.take(worker_id, Hello(info=info, fingerprint={}))
                head.table.take(worker_id, Ready(phase=0))
                report = Beats(beats=[BeatOf(worker_id, 0.0, beat()), BeatOf("w99", 0.0, beat())])
                while not agent.following.report(report):
                    await asyncio.sleep(0)
                while head.state.workers[worker_id].beat is None:
                    await asyncio.sleep(0)
                assert head.state.workers[worker_id].beat == beat()
                following = agent.following
            assert not following.report(report)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


# -- the worker --------------------------------------------------------------------------------------


@pytest.fixture
def slotted(connections: Connections, page: BeatPage) -> Iterator[tuple[Connection, BeatSlot]]:
    """A member with a slot: its connection to the head, and the slot as its agent sees it."""
    worker, agent = both_sides(page)
    spec = WorkerSpec(head="ws://nowhere:1", worker_id="w0", host="lab")
    with contextlib.closing(Member(spec, INFO, {}, slot=worker).connect()):
        yield connections.get(), agent


def test_a_worker_is_silent_towards_the_head_while_its_agent_reports(slotted: tuple[Connection, BeatSlot]) -> None:
    connection, agent = slotted
    connection.hears(Beat)
    taken = 0
    deadline = time.monotonic() + WAIT_S
    silent = 0
    while silent < 5:  # heartbeats in a row that only the agent has got
        assert time.monotonic() < deadline
        if (left := agent.read()) is not None:
            agent.take(left)
            taken += 1
            is_silent = not any(isinstance(said, Beat) for said in drained(connection))
            silent = silent + 1 if is_silent else 0
    assert taken >= 5


def test_a_worker_speaks_again_when_its_agent_does_not(slotted: tuple[Connection, BeatSlot]) -> None:
    connection, agent = slotted
    while not drained(connection):
        if (left := agent.read()) is not None:
            agent.take(left)
    for _ in range(3):
        connection.hears(Beat)  # nobody takes what it leaves


def drained(connection: Connection) -> list[object]:
    return [connection.said.get() for _ in range(connection.said.qsize())]
