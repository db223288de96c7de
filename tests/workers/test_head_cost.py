"""What a run of many workers costs its head: nothing that grows with their square, and no keys of what is over."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from tests.pure.test_membership import AGENT, Story, Unvisited, beat, counting, info
from tests.waiting import WAIT_S
from unisono.cluster.head.keystore import Keys
from unisono.cluster.head.server import Head, Settings
from unisono.cluster.head.versions import HeadMemory
from unisono.cluster.worker.packed import unpack
from unisono.core.events import WorkerJoined
from unisono.core.messages import (
    Happened,
    HeadSnapshot,
    Hello,
    Holding,
    Kept,
    Lost,
    Message,
    Ready,
    Scale,
    StoreAnswer,
    StoreCall,
    decode,
)
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.membership import Lags
from unisono.membership.roster import WorkerState


def head_of(story: Story, heartbeat_s: float = 0.5) -> tuple[Head, asyncio.Queue[bytes]]:
    """A head that knows what a story's does, and what it sends to the agent that has started it."""
    spec = RunSpec(settings=RunSettings(heartbeat_s=heartbeat_s))
    head = Head(Settings(policy=story.state.policy, run_id="x", spec=spec), "")
    head.table.state = story.state
    said = asyncio.Queue[bytes]()
    head._lines[AGENT] = cast("Any", SimpleNamespace(queue=said, put=said.put_nowait))
    return head, said


def snapshots(said: asyncio.Queue[bytes]) -> list[HeadMemory]:
    heard: list[Message] = [decode(unpack(said.get_nowait())) for _ in range(said.qsize())]
    return [HeadMemory.decode(message.state) for message in heard if isinstance(message, HeadSnapshot)]


def test_a_heartbeat_costs_the_head_the_same_however_many_workers_there_are() -> None:
    async def count(num_workers: int) -> int:
        story = Story(num_workers, heartbeat_timeout_s=1e6, hang_s=1e6)
        story.arrive(*story.agent(num_workers))
        story.hold()
        head, _ = head_of(story)
        head.table.take("w0", beat())  # sets the timer
        head.table.state = msgspec.structs.replace(head.state, workers=Unvisited(head.state.workers))
        with counting() as calls:
            head.table.take("w7", beat())
        return len(calls)

    assert asyncio.run(count(16)) == asyncio.run(count(256))


def test_what_all_members_say_at_once_is_remembered_once() -> None:
    """What is remembered is as long as there are members, and a member says it again to a head that follows."""

    async def work() -> list[HeadMemory]:
        story = Story(32)
        story.agent(32)
        head, said = head_of(story, heartbeat_s=0.01)
        ids = [f"w{number}" for number in range(32)]
        for worker_id in ids:
            head.table.take(worker_id, Hello(info=info(worker_id), fingerprint={}))
        for worker_id in ids:
            head.table.take(worker_id, Ready(phase=0))
        for worker_id in ids:
            head.table.take(worker_id, Holding(generation=1))
        found = snapshots(said)
        while not any(all(w.state is WorkerState.HOLDING for w in m.state.workers.values()) for m in found):
            await asyncio.sleep(0)
            found += snapshots(said)
        return found

    found = asyncio.run(work())
    assert len(found) <= 3, "of the generation, before anybody hears of it, and of what was said"


def test_who_joins_at_the_same_time_is_told_together() -> None:
    """A message for each of 1,000 workers to each of 125 machines would keep a head busy for seconds."""

    async def work() -> list[Happened]:
        story = Story(32)
        story.agent(32)
        head, said = head_of(story, heartbeat_s=0.01)
        ids = [f"w{number}" for number in range(32)]
        for message in (Ready(phase=0), Holding(generation=1)):
            for worker_id in ids:
                if isinstance(message, Ready):
                    head.table.take(worker_id, Hello(info=info(worker_id), fingerprint={}))
                head.table.take(worker_id, message)
        found: list[Happened] = []
        while sum(isinstance(event, WorkerJoined) for told in found for event in told.events) < 32:
            await asyncio.sleep(0)
            heard: list[Message] = [decode(unpack(said.get_nowait())) for _ in range(said.qsize())]
            found += [message for message in heard if isinstance(message, Happened)]
            head.table.take_kept(AGENT, Kept(term=1, number=head.table.version))
        return found

    found = asyncio.run(work())
    assert len(found) <= 3
    joined = [event.worker_id for told in found for event in told.events if isinstance(event, WorkerJoined)]
    assert sorted(joined) == sorted(f"w{number}" for number in range(32)), "each once"


def test_the_keys_of_a_generation_go_when_it_is_over() -> None:
    async def work() -> None:
        keys = Keys()

        async def do(operation: str, key: str, generation: int, value: bytes = b"1") -> int:
            values = [value] if operation in ("set", "append") else []
            call = StoreCall(call=1, operation=operation, keys=[key], values=values, amount=1, generation=generation)
            answer = await keys.answer(call)
            assert answer.error == ""
            return answer.amount

        for generation in (0, 1, 2, 3):
            await do("set", f"{generation}/a", generation)
            await do("add", f"{generation}/b", generation)
            await do("append", f"{generation}/c", generation)
        keys.end_generations(2)
        await do("set", "1/late", 1)
        left = [[await do("check", f"{generation}/{key}", 0) for key in "abc"] for generation in range(4)]
        assert left == [[1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
        assert await do("check", "1/late", 0) == 0
        assert (await keys.answer(StoreCall(call=1, operation="num_keys", keys=[]))).amount == 9

    asyncio.run(work())


def test_a_head_forgets_the_keys_of_the_generations_before_the_last_two() -> None:
    async def work() -> None:
        story = Story(4)
        story.arrive(*story.agent(4))
        story.hold()
        head, _ = head_of(story)
        for number in (3, 2):
            key = f"generation-{head.state.generation}/all/0"
            call = StoreCall(call=1, operation="set", keys=[key], values=[b"x"], generation=head.state.generation)
            await head._keys.answer(call)
            head.table.take("", Scale(num_workers=number))
            for member in head.state.members:
                head.table.take(member, Holding(generation=head.state.generation))
        assert head.state.generation == 3
        assert sorted(head._keys._values) == ["generation-2/all/0"]

    asyncio.run(work())


def test_a_key_wakes_those_only_for_whom_it_is_the_last_one() -> None:
    """All members of a group wait for a key of each: with 1,000 of them, a look at all for each key would be a
    thousand million looks.
    """

    async def work() -> None:
        keys, num_members = Keys(), 64
        names = [f"generation-1/all/here-{number}" for number in range(num_members)]

        async def do(operation: str, wanted: list[str], timeout_s: float = WAIT_S) -> StoreAnswer:
            values = [b""] * len(wanted) if operation == "set" else []
            call = StoreCall(call=1, operation=operation, keys=wanted, values=values, timeout_s=timeout_s, generation=1)
            return await keys.answer(call)

        waiting = [asyncio.create_task(do("wait", names)) for _ in range(num_members)]
        await asyncio.sleep(0)
        for name in names[:-1]:
            with counting() as calls:
                await do("set", [name])
            assert len(calls) < 30, "nobody wakes up"
        assert not any(task.done() for task in waiting)
        late = await do("wait", [*names, "never"], timeout_s=0.0)
        assert late.error == f"timeout: no key {names[-1]}, never within 0.0 s"
        await do("set", names[-1:])
        assert [answer.error for answer in await asyncio.gather(*waiting)] == [""] * num_members
        assert not keys._waiting

    asyncio.run(work())


def test_a_list_of_all_members_is_encoded_once_for_all_of_them() -> None:
    async def work() -> list[bytes]:
        story = Story(400)
        ids = story.agent(400)
        head, _ = head_of(story)
        said = asyncio.Queue[bytes]()
        for worker_id in ids:
            head._lines[worker_id] = cast("Any", SimpleNamespace(queue=said, put=said.put_nowait))
            head.table.take(worker_id, Hello(info=info(worker_id), fingerprint={}))
        del head._lines[AGENT]
        head.table.take(AGENT, Lags())
        for worker_id in ids:
            head.table.take(worker_id, Ready(phase=0))
        return [said.get_nowait() for _ in range(said.qsize())]

    found = asyncio.run(work())
    assert len(found) == 400
    assert all(data is found[0] for data in found)
    assert len(decode(unpack(found[0])).members) == 400


def test_the_head_may_have_as_many_connections_as_the_system_lets_it() -> None:
    """The usual limit of open files is 1,024; a process may raise it to its hard limit by itself."""
    code = (
        "import resource as r; _, hard = r.getrlimit(r.RLIMIT_NOFILE); r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); "
        "from unisono.system.lifetime import raise_file_limit; raise_file_limit(); "
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_head_that_has_taken_over_tells_its_heirs_its_state_a_few_times_and_not_for_each_worker() -> None:
    """All workers call it at the same time, and each is sent the newest notice again."""

    async def work() -> tuple[list[HeadMemory], int]:
        story = Story(32)
        ids = story.agent(32)
        story.arrive(*ids)
        story.hold()
        head, said = head_of(story, heartbeat_s=WAIT_S)
        told = asyncio.Queue[bytes]()
        head.table.take(AGENT, Kept(term=1, number=0))  # what it says first is said at once
        for worker_id in ids:
            head._lines[worker_id] = cast("Any", SimpleNamespace(queue=told, put=told.put_nowait))
            head.table.take(worker_id, Hello(info=info(worker_id), fingerprint={}, generation=1))
            head.table.take(worker_id, Ready(phase=0))
            head.table.take(worker_id, Holding(generation=1))
        head.table.take("w7", Lost())
        head.table.take_kept(AGENT, Kept(term=1, number=head.table.version))
        found = snapshots(said)
        return found, told.qsize()

    found, num_notices = asyncio.run(work())
    assert len(found) == 1, "before the first worker is told of the generation"
    assert num_notices == 32
