"""The agents that hold what the head knows: nothing is acted on that a head which follows would not know."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
import pytest

from tests.waiting import WAIT_S
from tests.workers.test_head_death import dial, hear, serving
from unisono.cluster.head.server import Head, Settings
from unisono.cluster.head.versions import HeadMemory
from unisono.cluster.machine.head_connection import Following
from unisono.cluster.worker.packed import unpack
from unisono.core.following import Absence, Followed, StaleHead
from unisono.core.messages import (
    AgentHello,
    Ended,
    Foreign,
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
    Scale,
    Start,
    StoreAnswer,
    StoreCall,
    UserSentence,
    Verdict,
    WorkerExit,
    decode,
    encode,
)
from unisono.core.policy import Policy
from unisono.core.settings import Partition
from unisono.core.spec import RunSpec
from unisono.membership import Lags, heirs
from unisono.membership.roster import ALIVE, State, WorkerState

M = TypeVar("M", bound=Message)


class Follower:
    """An agent of which there is nothing but how it follows the head."""

    def __init__(self, url: str, *, primary: bool, token: str = "secret") -> None:
        hello = AgentHello(host="lab" if primary else "far", pid=1, num_workers=1, primary=primary)
        self.following = Following(url, token, hello, self, away_s=WAIT_S, head=None)
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.ended: Ended | None = None

    def receive(self, message: Message) -> None:
        self.heard.put_nowait(message)

    def on_notice(self, text: str) -> None:
        pass

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        pass

    def end(self, ended: Ended) -> None:
        self.ended = ended

    def known_end(self) -> Ended | None:
        return None

    def follow(self, url: str) -> None:
        self.followed = url

    def has_workers(self) -> bool:
        return False

    async def forget_workers(self) -> None:
        pass

    async def hears(self, kind: type[M]) -> M:
        while not isinstance(message := await self.heard.get(), kind):
            pass
        return message


@contextlib.asynccontextmanager
async def follower(url: str, *, primary: bool) -> AsyncIterator[Follower]:
    agent = Follower(url, primary=primary)
    running = asyncio.create_task(agent.following.run())
    try:
        yield agent
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def waits_for_heirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heir is left out because this machine is busy."""
    monkeypatch.setattr("unisono.core.following.HEIR_ANSWERS_S", WAIT_S)


@pytest.mark.usefixtures("waits_for_heirs")
def test_a_machine_that_joined_holds_the_same_state_as_the_one_that_started_the_run() -> None:
    async def story() -> None:
        async with serving(run_id="x") as (head, url):
            async with follower(url, primary=True) as first, follower(url, primary=False) as guest:
                assert (await first.hears(Start)).worker_ids == ["w0"]
                started = (await guest.hears(Start)).worker_ids
                for agent in (first, guest):
                    held = agent.following.snapshot
                    assert held is not None
                    assert started[0] in HeadMemory.decode(held.state).state.workers, "held before it was asked for"
                outside = await dial(url)
                await outside.send(encode(Scale(num_workers=5)))
                assert "scaled to 5 workers" in (await hear(outside, UserSentence)).text
                assert first.following.snapshot == guest.following.snapshot
                assert head.state.policy.maximum == 5

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


@pytest.mark.usefixtures("waits_for_heirs")
def test_what_is_decided_is_sent_when_the_heirs_hold_it() -> None:
    async def story() -> None:
        async with serving(run_id="x") as (head, url):
            agent = await dial(url)
            await agent.send(encode(AgentHello(host="lab", pid=1, num_workers=2, primary=True)))
            snapshot = await hear(agent, HeadSnapshot)
            assert "w1" in HeadMemory.decode(snapshot.state).state.workers
            await agent.send(encode(StoreCall(call=1, operation="num_keys", keys=[])))
            assert isinstance(decode(await agent.recv(decode=False)), StoreAnswer), "and nothing before that"
            await agent.send(encode(Kept(term=snapshot.term, number=snapshot.number)))
            assert (await hear(agent, Start)).worker_ids == ["w0", "w1"]
            assert not head.state.agents["agent0"].lags

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_an_heir_that_does_not_answer_delays_a_decision_and_does_not_prevent_it() -> None:
    async def story() -> None:
        async with serving(run_id="x") as (head, url):
            agent = await dial(url)
            await agent.send(encode(AgentHello(host="lab", pid=1, num_workers=1, primary=True)))
            await hear(agent, Start)
            assert head.state.agents["agent0"].lags
            while head.state.agents["agent0"].lags:  # it answers again
                await agent.send(encode(Kept(term=1, number=head.table.version)))
                await hear(agent, HeadSnapshot)
            assert heirs(head.state) == ("agent0",)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


@pytest.mark.parametrize("who", ["agent", "worker"])
def test_a_head_that_hears_of_a_higher_term_stays(who: str) -> None:
    """That head may be the one that has given way to this one, and its agent not know it."""

    async def story() -> None:
        async with serving(run_id="x") as (head, url):
            stranger = await dial(url)
            info = MemberInfo(worker_id="w7", host="lab", pid=2, device="cpu")
            hello = AgentHello(host="lab", pid=1, num_workers=1, agent_id="agent1", term=2)
            await stranger.send(encode(hello if who == "agent" else Hello(info=info, fingerprint={}, term=2)))
            if who == "agent":
                assert (await hear(stranger, Foreign)).step == -1
            await stranger.wait_closed()
            assert not head.over.is_set()
            assert (head.state.agents, head.state.workers) == ({}, {})

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_an_agent_that_is_late_hears_from_its_head_which_head_that_gives_way_to() -> None:
    """The head waits for that before it ends: nobody else can tell this machine."""

    async def story() -> None:
        async with serving(run_id="x") as (old, url), serving(run_id="x") as (new, there):
            old.table.state = msgspec.structs.replace(old.state, seat="agent7")
            caller = await dial(url)
            proposal = Proposal(run_id="x", agent_id="agent0", term=1, step=5, url=there)
            await caller.send(encode(proposal))
            assert (await hear(caller, Verdict)).gives_way == "me"
            agent = Follower(url, primary=False)
            agent.following.agent_id = "agent7"
            running = asyncio.create_task(agent.following.run())
            await asyncio.wait_for(old.over.wait(), WAIT_S)
            assert old.has_given_way
            await agent.hears(Start)
            assert new.state.agents.keys() == {agent.following.agent_id}
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


@pytest.mark.parametrize("reason", ["rejects this machine with HTTP 401", "broke"], ids=["refused", "not there"])
def test_a_machine_that_cannot_reach_the_head_at_all_says_why(reason: str) -> None:
    async def story() -> None:
        async with serving(run_id="x") as (_, url):
            is_refused = "rejects" in reason
            agent = Follower(url if is_refused else "ws://127.0.0.1:1", primary=False, token="wrong")
            await agent.following.run()
            assert agent.ended is not None
            assert reason in agent.ended.reason

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_an_agent_leaves_a_head_of_a_lower_term() -> None:
    """It does not act on what that head says, and looks for the other one."""

    async def story() -> None:
        async with serving(run_id="old") as (head, url):
            async with follower(url, primary=True) as agent:
                await agent.hears(Start)
                side = agent.following._side
                agent.following._side = msgspec.structs.replace(side, followed=side.followed.learn(2))
                with pytest.raises(StaleHead):
                    agent.following._take(HeadSnapshot(term=1, number=99, state=b""))
                assert agent.following.snapshot != HeadSnapshot(term=1, number=99, state=b"")
                assert not head.over.is_set()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


@pytest.mark.parametrize("partition", ["wait", "go-on"])
def test_a_machine_that_ends_says_that_it_was_not_to_go_on(partition: Partition) -> None:
    async def story() -> None:
        agent = Follower("ws://127.0.0.1:1", primary=False)
        head = cast("Any", SimpleNamespace(url="ws://127.0.0.1:2"))
        hello = AgentHello(host="far", pid=1, num_workers=1)
        following = Following("ws://127.0.0.1:1", "secret", hello, agent, away_s=1.0, head=head, partition=partition)
        following.agent_id = "agent1"
        newest = HeadSnapshot(term=1, number=1, state=b"", heirs=["agent0", "agent1"])
        following._side = msgspec.structs.replace(following._side, followed=Followed().keep(newest)[0])
        following._absence = Absence(since=-1e9)
        following._note_absence("the head is away")
        assert agent.ended is not None
        assert ("--set when-cut=wait" in agent.ended.reason) == (partition == "wait")

    asyncio.run(story())


class Connected:
    """A head whose workers and agents are this test: it takes what they are sent, and answers when it likes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.head = Head(Settings(policy=Policy(start=2, maximum=6), run_id="x", spec=RunSpec()), "")
        self.unanswered: dict[str, list[HeadSnapshot]] = {}
        self.held: dict[str, State] = {}
        self.ordered: list[str] = []
        self.num_acted_on = 0

    def connect(self, name: str, hello: Message) -> None:
        self.unanswered[name] = []

        def put(data: bytes | None) -> None:
            if data:
                self.sent(name, decode(unpack(data)))

        line = SimpleNamespace(put=put, queue=asyncio.Queue())
        self.head._lines[name] = cast("Any", line)
        self.head.table.take(name, hello)

    def sent(self, name: str, message: Message) -> None:
        """What is sent to a worker or an agent is known to all who may start the next head."""
        if isinstance(message, HeadSnapshot):
            self.unanswered[name].append(message)
        elif isinstance(message, Notice | Start | Ended):
            for heir in heirs(self.head.state):
                known = self.held[heir]
                if isinstance(message, Notice):
                    assert known.generation >= message.generation
                elif isinstance(message, Start):
                    assert known.workers.keys() >= set(message.worker_ids)
                elif message.reason == getattr(self.head.state.ended, "reason", ""):
                    assert known.ended == message
                self.num_acted_on += 1
        if isinstance(message, Start):
            self.ordered += message.worker_ids

    # -- what may happen

    def machine(self) -> None:
        number = self.head.state.num_agents
        hello = AgentHello(host=f"host{number}", pid=number, num_workers=2, primary=number == 0)
        self.connect(f"agent{number}", hello)

    def answer(self) -> None:
        """An agent answers what it was sent first."""
        if waiting := [name for name, snapshots in self.unanswered.items() if snapshots]:
            name = self.rng.choice(waiting)
            snapshot = self.unanswered[name].pop(0)
            self.held[name] = HeadMemory.decode(snapshot.state).state
            self.head.table.take_kept(name, Kept(term=snapshot.term, number=snapshot.number))

    def lag(self) -> None:
        if found := heirs(self.head.state):
            self.head.table.take(self.rng.choice(found), Lags())

    def go(self) -> None:
        """A machine is cut off."""
        agents = self.head.state.agents
        if guests := [name for name, agent in agents.items() if not agent.primary and name in self.head._lines]:
            name = self.rng.choice(guests)
            del self.head._lines[name], self.unanswered[name]
            self.head.table.take(name, Lost(reason="it is gone"))

    def arrive(self) -> None:
        if self.ordered:
            worker_id = self.ordered.pop(0)
            info = MemberInfo(worker_id=worker_id, host="lab", pid=1, device="cpu")
            self.connect(worker_id, Hello(info=info, fingerprint={}))
            if self.head.state.workers[worker_id].state is WorkerState.STARTING:
                self.head.table.take(worker_id, Ready(phase=0))

    def hold(self) -> None:
        state = self.head.state
        for worker_id in state.members:
            if state.workers[worker_id].state in (WorkerState.ADMITTED, WorkerState.HOLDING):
                self.head.table.take(worker_id, Holding(generation=state.generation))

    def kill(self) -> None:
        alive = [worker for worker in self.head.state.workers.values() if worker.state in ALIVE and worker.info]
        agents = self.head.state.agents
        if killed := [worker for worker in alive if worker.agent in agents]:
            worker = self.rng.choice(killed)
            self.head.table.take(worker.agent, WorkerExit(worker_id=worker.worker_id, exit_code=-9))


@pytest.mark.parametrize("seed", range(10))
def test_all_heirs_know_what_workers_and_agents_act_on(seed: int) -> None:
    """Whoever joins, goes, is silent or is killed: a head that follows decides nothing otherwise."""

    async def story() -> None:
        world = Connected(seed)
        world.machine()
        moves = [world.answer] * 30 + [world.arrive] * 4 + [world.hold] * 2 + [world.kill, world.lag, world.machine]
        for _ in range(600):
            world.rng.choice([*moves, world.go])()
        assert world.num_acted_on > 20

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
