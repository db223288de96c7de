"""The head dies: members train on, another head takes them back, and nothing restarts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.pure.test_journal import step
from tests.pure.test_membership import step_done, training
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import wait_until_gone
from unisono.cli.reach import NotGoing, ask_status, find
from unisono.cluster.head.connections import MAX_STEPS_QUEUED
from unisono.cluster.head.server import Head, Settings
from unisono.cluster.head.versions import HeadMemory
from unisono.cluster.trust.invitation import Invitation
from unisono.core import events
from unisono.core.messages import (
    AgentHello,
    Ended,
    Happened,
    HeadSnapshot,
    Hello,
    MemberInfo,
    Message,
    Ready,
    RunDirectoryChosen,
    Stop,
    UserSentence,
    Welcome,
    decode,
    encode,
)
from unisono.core.policy import Policy
from unisono.core.spec import RunSpec
from unisono.membership.roster import Agent, State, WorkerState
from unisono.record.journal import JOURNAL, compare, read
from unisono.system.lifetime import end_when_silent
from unisono.system.owned import read_regular
from unisono.testing import run_workers

pytestmark = pytest.mark.more

# The gate of these scripts is within a step, where the others wait for the worker that stands at it: it is not late.
RUN = [
    sys.executable,
    "-m",
    "unisono",
    "run",
    *PATIENT,
    "--set",
    f"report-late-after={WAIT_S}s",
    "--set",
    f"kill-after={WAIT_S}s",
]
M = TypeVar("M", bound=Message)

# A script that stands still at a step until the test has done what it wants to do there.
SCRIPT = """
import pathlib, sys, torch, unisono
from torch.nn import functional as F
from torch.utils.data import TensorDataset

gate = pathlib.Path(sys.argv[1])
with unisono.Run(seed=3) as run:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=4, epochs=6):
        if step.number_in_loop == 5 and run.is_main:
            (gate / "reached").open("w").write("x")  # a pipe: the test reads it, and then answers
            (gate / "go").open().read()
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
"""


# The same after a short phase, at whose end there is a checkpoint.
SAVES = SCRIPT.replace(
    "    for step in run.steps(",
    """    for step in run.steps(data, batch_size=24, microbatches=4, max_steps=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    run.save()
    for step in run.steps(""",
)


@dataclasses.dataclass(frozen=True)
class Held:
    """A run whose first worker stands at a step until the test has done what it wants to do there."""

    process: subprocess.Popen[str]
    directory: Path
    gate: Path

    def wait_until_reached(self) -> None:
        (self.gate / "reached").read_text()

    def go_on(self) -> None:
        (self.gate / "go").write_text("go")

    def head(self) -> int:
        """The process id of the head."""
        return int(json.loads((self.directory / "head.json").read_text())["pid"])

    def output(self) -> str:
        """All that was said, when the command has ended."""
        return self.process.communicate(timeout=WAIT_S)[0]


@contextlib.contextmanager
def held_run(folder: Path, text: str, workers: int) -> Iterator[Held]:
    """`unisono run` of a script; yields when its first worker is at the gate."""
    script, gate, directory = folder / "train.py", folder / "gate", folder / "run"
    script.write_text(text)
    gate.mkdir()
    for name in ("reached", "go"):
        os.mkfifo(gate / name)
    command = [*RUN, "-n", str(workers), "--run-dir", directory, script, "--", gate]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            held = Held(process, directory, gate)
            held.wait_until_reached()
            yield held
        except BaseException:
            process.kill()
            raise


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("also_a_worker", [False, True], ids=["head", "head-and-worker"])
def test_another_head_takes_over_and_no_worker_restarts(
    tmp_path: Path, also_a_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.cli.reach.TIMEOUT_S", WAIT_S)  # whoever calls only waits
    with held_run(tmp_path, SCRIPT, 3) as run:
        address = find(str(run.directory))
        before = ask_status(address)
        old = run.head()
        os.kill(old, signal.SIGKILL)
        if also_a_worker:
            os.kill(before["workers"][-1]["pid"], signal.SIGKILL)
        wait_until_gone({old}, time.monotonic() + WAIT_S)
        after = ask_status(address)
        run.go_on()
        output = run.output()
    calm_gate = tmp_path / "calm"
    calm_gate.mkdir()
    (calm_gate / "go").write_text("")
    calm = run_workers(tmp_path / "train.py", 1, directory=tmp_path / "one", arguments=[str(calm_gate)])
    assert calm.exit_code == 0, calm.output

    assert run.process.returncode == 0, output
    assert "another one takes over" in output
    assert after["started"] == before["started"]
    assert after["reason"] == before["reason"] or also_a_worker
    assert before["reason"] == "all are ready; generation 1 with 3 workers"
    assert compare(tmp_path / "one", run.directory).startswith("identical: 12 steps")
    generations = {line["generation"] for line in read(run.directory / JOURNAL) if line["kind"] == "step"}
    assert (generations == {1}) is not also_a_worker, output


@pytest.mark.usefixtures("nursery")
def test_a_machine_that_has_joined_follows_the_next_head_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers go on, and one of them that is lost is replaced there."""
    monkeypatch.setattr("unisono.cli.reach.TIMEOUT_S", WAIT_S)
    join = [sys.executable, "-m", "unisono", "join", "-n", "1"]
    with held_run(tmp_path, SCRIPT, 1) as run:
        address = find(str(run.directory))
        command = [*join, address.url, "--token-file", run.directory / "token"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as guest:
            try:
                before = workers_of(address, 2)
                old = run.head()
                os.kill(old, signal.SIGKILL)
                wait_until_gone({old}, time.monotonic() + WAIT_S)
                assert workers_of(address, 2) == before
                os.kill(before["w1"], signal.SIGKILL)
                assert list(workers_of(address, 2, without=["w1"])) == ["w0", "w2"]
                run.go_on()
                output, told = run.output(), guest.communicate(timeout=WAIT_S)[0]
            except BaseException:
                guest.kill()
                raise
    assert (run.process.returncode, guest.returncode) == (0, 0), output + told
    assert "another one takes over" in output
    assert "worker w1" in output
    assert "worker w2 replaces it now" in output


def workers_of(address: Invitation, num_workers: int, without: Collection[str] = ()) -> dict[str, int]:
    """The pids of so many workers that wait to be admitted or take part, when they are there."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(NotGoing):
            states = {WorkerState.READY.value, WorkerState.ADMITTED.value, WorkerState.HOLDING.value}
            found = [worker for worker in ask_status(address)["workers"] if worker["state"] in states]
            pids = {worker["worker_id"]: worker["pid"] for worker in found}
            if len(pids) == num_workers and not pids.keys() & set(without):
                return pids
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("nursery")
def test_when_the_head_and_all_workers_are_lost_the_run_does_not_begin_again(tmp_path: Path) -> None:
    """The head that follows knows that steps were done; the run ends, and names the checkpoint to go on from."""
    with held_run(tmp_path, SAVES, 2) as run:
        workers = [worker["pid"] for worker in ask_status(find(str(run.directory)))["workers"]]
        for pid in (run.head(), *workers):
            os.kill(pid, signal.SIGKILL)
        output = run.output()
    assert run.process.returncode == 1, output
    assert "another one takes over" in output
    assert "begins again" not in output
    assert "no worker with the run's state is left" in output
    assert "the newest checkpoint is step-0000000002; to resume from it: unisono run --resume" in output


@pytest.mark.usefixtures("nursery")
def test_what_the_head_said_last_is_heard_before_another_one_follows(tmp_path: Path) -> None:
    """Also by a command that stood still meanwhile: the head that follows must know that steps were done."""
    with held_run(tmp_path, SCRIPT.replace("step.number_in_loop == 5", "step.number_in_loop in (0, 5)"), 1) as run:
        address = find(str(run.directory))
        os.kill(run.process.pid, signal.SIGSTOP)
        run.go_on()
        run.wait_until_reached()
        deadline = time.monotonic() + WAIT_S
        while (status := ask_status(address))["step"] is None:
            assert time.monotonic() < deadline
        pids = {run.head(), status["workers"][0]["pid"]}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids, deadline)
        os.kill(run.process.pid, signal.SIGCONT)
        output = run.output()
    assert run.process.returncode == 1, output
    assert "another one takes over" in output
    assert "was killed by signal 9 (SIGKILL); no worker with the run's state is left" in output


def test_of_all_steps_the_first_is_told_to_who_keeps_the_heads_memory(tmp_path: Path) -> None:
    """From then on there is something to lose. Not each of them: a snapshot has all that the head knows."""

    async def story() -> None:
        async with serving(run_id="first") as (_, url):
            agent, worker = await dial(url), await dial(url)
            await agent.send(encode(AgentHello(host="lab", pid=1, num_workers=0, primary=True)))
            info = MemberInfo(worker_id="w0", host="lab", pid=2, device="cpu")
            await worker.send(encode(Hello(info=info, fingerprint={})))
            last = Happened(events=[events.EvaluationFinished(number=3, step=3, totals={})])
            for message in (Ready(phase=0), *map(step_done, range(3)), last):
                await worker.send(encode(message))
            committed = []
            while (heard := decode(await agent.recv(decode=False))) != last:
                if isinstance(heard, HeadSnapshot):
                    committed.append(HeadMemory.decode(heard.state).state.committed)
            assert committed[-1] == 0
            assert committed.count(0) == 1

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_head_waits_at_the_end_for_the_command_that_has_yet_to_find_it() -> None:
    """It follows one that has died. The run may be over before the command is connected, which has to hear of it."""
    command = Agent(agent_id="agent0", host="lab", primary=True, pid=1)
    state = State(policy=Policy(start=1, maximum=1), agents={"agent0": command})

    async def story() -> None:
        async with serving(run_id="next", snapshot=HeadMemory(state, 0.0, "").encode()) as (head, url):
            outside = await dial(url)
            await outside.send(encode(Stop(reason="enough")))
            await outside.wait_closed()
            assert not head.over.is_set()
            agent = await dial(url)
            hello = AgentHello(host="lab", pid=1, num_workers=0, primary=True, agent_id="agent0")
            await agent.send(encode(hello))
            assert (await hear(agent, Ended)).reason == "enough"
            await agent.close()
            await asyncio.wait_for(head.over.wait(), WAIT_S)

    asyncio.run(asyncio.wait_for(story(), 2 * WAIT_S))


@pytest.mark.usefixtures("nursery")
def test_a_head_that_has_ended_is_not_followed_by_another(tmp_path: Path) -> None:
    """It has ended the workers as well: there is nothing to take over."""
    with held_run(tmp_path, SCRIPT, 1) as run:
        os.kill(run.head(), signal.SIGTERM)
        output = run.output()
    assert run.process.returncode == 1, output
    assert "the head has ended the run" in output
    assert "takes over" not in output


def test_a_head_that_follows_knows_the_directory_that_the_script_has_chosen(tmp_path: Path) -> None:
    """Its address is there as well, and goes when it goes."""
    directory = tmp_path / "run"

    async def story() -> None:
        async with serving(run_id="first") as (head, url):
            agent, worker = await dial(url), await dial(url)
            await agent.send(encode(AgentHello(host="lab", pid=1, num_workers=1, primary=True)))
            info = MemberInfo(worker_id="w0", host="lab", pid=2, device="cpu")
            await worker.send(encode(Hello(info=info, fingerprint={})))
            await worker.send(encode(RunDirectoryChosen(path=str(directory))))
            await hear(agent, RunDirectoryChosen)
            snapshot = (await hear(agent, HeadSnapshot)).state
            assert json.loads((directory / "head.json").read_text())["run_id"] == "first"
            head._address._written.clear()  # it is killed
        async with serving(run_id="second", snapshot=snapshot) as (head, url):
            assert json.loads((directory / "head.json").read_text())["run_id"] == "second"
            assert head.status()["run_dir"] == str(directory)
        assert list(directory.iterdir()) == []
        directory.rmdir()  # or moved: what is made in its place would look like a run, and be none
        async with serving(run_id="third", snapshot=snapshot):
            pass
        assert not directory.exists()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_directory_on_a_disk_that_stands_still_holds_up_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where a worker names it, nor at the start and at the end of a head that follows."""
    file = tmp_path / "run.json"
    agent_hello = AgentHello(host="lab", pid=1, num_workers=1, primary=True)
    worker_hello = Hello(info=MemberInfo(worker_id="w0", host="lab", pid=2, device="cpu"), fingerprint={})

    async def story() -> None:
        async with serving(run_id="first") as (_, url):
            agent, worker = await dial(url), await dial(url)
            await agent.send(encode(agent_hello))
            await worker.send(encode(worker_hello))
            await worker.send(encode(RunDirectoryChosen(path=str(tmp_path))))
            await hear(agent, RunDirectoryChosen)
            outside = await dial(url)
            await outside.send(encode(Stop(reason="enough")))
            assert "enough" in (await hear(outside, UserSentence)).text
        follows = HeadMemory(State(policy=Policy(start=1, maximum=1)), 0.0, "", str(tmp_path)).encode()
        async with serving(run_id="first", snapshot=follows) as (_, url):
            agent = await dial(url)
            await agent.send(encode(agent_hello))
            assert not (await hear(agent, Welcome)).may_write, "another side may"

    with standing_still(file, monkeypatch):
        asyncio.run(asyncio.wait_for(story(), WAIT_S))


@contextlib.contextmanager
def standing_still(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk on which who reads this file waits; fails where the test waits for it too."""
    file.write_text("{}")
    is_over, late = threading.Event(), []

    def wait_and_read(path: Path, *most: int) -> bytes:
        if path == file:
            late.append(not is_over.wait(WAIT_S / 2))
        return read_regular(path, *most)

    monkeypatch.setattr("unisono.record.rundir.read_regular", wait_and_read)
    try:
        yield
    finally:
        is_over.set()
        while any(thread.name == "unisono-disk" for thread in threading.enumerate()):
            pass
    assert late, "nobody has read it"
    assert not any(late), "the head has waited for the disk"


@contextlib.asynccontextmanager
async def serving(*, run_id: str, snapshot: bytes = b"") -> AsyncIterator[tuple[Head, str]]:
    policy = Policy(start=1, maximum=1)
    head = Head(Settings(policy=policy, run_id=run_id, spec=RunSpec()), "secret", snapshot)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        running = asyncio.create_task(head.run(listener))
        await (await dial(url)).close()  # it serves
        yield head, url
        head.over.set()
        await running


async def dial(url: str) -> ClientConnection:
    return await connect(url, additional_headers={"Authorization": "Bearer secret"}, proxy=None)


async def hear(connection: ClientConnection, kind: type[M]) -> M:
    """The next message of this kind."""
    while not isinstance(message := decode(await connection.recv(decode=False)), kind):
        pass
    return message


def test_a_program_of_this_machine_may_stand_still_while_much_is_sent_to_it() -> None:
    """Ctrl-Z on `unisono run`: what cannot be delivered meanwhile must not look like a cut cable."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
            for end in (near, far):
                end_when_silent(end)
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_an_agent_that_stands_still_misses_steps_and_nothing_else() -> None:
    """Otherwise what waits for it grows until the head gives it up, and the run ends."""
    agent = Agent(agent_id="agent0", host="lab", primary=True)
    state = State(policy=Policy(start=1, maximum=1), agents={"agent0": agent})
    snapshot = HeadMemory(state, 0.0, "").encode()
    head = Head(Settings(policy=state.policy, run_id="x", spec=RunSpec()), "", snapshot)
    waiting = asyncio.Queue[bytes]()
    head._lines["agent0"] = cast("Any", SimpleNamespace(queue=waiting, put=waiting.put_nowait))
    for number in range(2 * MAX_STEPS_QUEUED):
        head._telling.pass_on([step(number, number=number)])
    head.tell_agents(UserSentence(text="the last"))
    kinds = [type(decode(waiting.get_nowait())) for _ in range(waiting.qsize())]
    assert kinds == [Happened] * (MAX_STEPS_QUEUED + 1) + [UserSentence]


def test_a_step_that_is_told_again_is_not_the_last_one() -> None:
    """A worker whose connection was broken says again which step it did last; others have gone on meanwhile."""

    async def story() -> Any:
        state = training(2).state
        head = Head(Settings(policy=state.policy, run_id="x", spec=RunSpec()), "", HeadMemory(state, 0.0, "").encode())
        head._telling.pass_on([step(7, number=7)])
        head._telling.pass_on([step(6, number=6)])
        return head.status()["step"]

    assert asyncio.run(story()) == 7
