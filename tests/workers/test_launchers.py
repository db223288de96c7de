"""Agents that a launcher starts: their output, their end, and that they end with the command that has started them."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from tests.house.toys import test_toy_launcher as toy
from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono, marked, wait_until_gone
from tests.workers.gates import Gates
from unisono.cluster.launchers import LAUNCHERS, AgentCommand, Handle, Launcher, Machine, Request, fleet
from unisono.cluster.launchers.fleet import Fleet
from unisono.core.errors import UsageError
from unisono.record.journal import compare
from unisono.system.capacity import parse_workers
from unisono.system.lifetime import PARENT

pytestmark = pytest.mark.more

LEFT, RIGHT = Machine(name="left", num_workers=1), Machine(name="right", num_workers=2)
FOR_EVER = "1000000"


class Agent(Handle):
    """Prints what the test says, and ends when the test wants it to."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._code: int | None = None
        self._on_end: Callable[[int], None]
        self.is_asked = False

    @property
    def exit_code(self) -> int | None:
        return self._code

    def follow(self, on_line: Callable[[str], None], on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        for line in self._lines:
            on_line(line)

    def end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._on_end(code)

    def terminate(self) -> None:
        self.is_asked = True

    async def close(self) -> None:
        self.end(-signal.SIGKILL)


class Rented(Launcher):
    """Two machines, whose agents are those of the test."""

    def __init__(self, left: Agent, right: Agent) -> None:
        self.agents = {"left": left, "right": right}
        self.commands: dict[str, AgentCommand] = {}

    def machines(self) -> list[Machine]:
        return [LEFT, RIGHT]

    def start(self, machine: Machine, command: AgentCommand) -> Agent:
        self.commands[machine.name] = command
        return self.agents[machine.name]


class Seen:
    """What the command that starts the run would show."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.gone: set[str] = set()

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        self.said.put_nowait(f"[{name}] {text}")

    def on_notice(self, text: str) -> None:
        self.said.put_nowait(text)

    def on_gone(self, names: Collection[str]) -> None:
        self.gone = set(names)

    def on_lost(self, reason: str) -> None:
        self.said.put_nowait(f"lost: {reason}")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_row_names_a_class(name: str) -> None:
    module, _, own = LAUNCHERS[name].path.partition(":")
    assert isinstance(getattr(importlib.import_module(module), own), type)


def test_the_output_of_agents_is_shown_and_their_failure_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "VERDICT_S", 0.0)
    rented, seen = Rented(Agent(["[w0] hello", "no route to host"]), Agent([])), Seen()

    async def work() -> list[str]:
        agents = Fleet(rented, [LEFT, RIGHT], "ws://head:1", "secret")
        agents.start(seen, seen.on_lost, seen.on_gone)
        said = [await seen.said.get(), await seen.said.get()]
        rented.agents["left"].end(255)
        said.append(await seen.said.get())
        assert seen.gone == {"left"}
        assert seen.said.empty(), "the other machine may go on alone"
        rented.agents["right"].end(-signal.SIGKILL)
        said += [await seen.said.get(), await seen.said.get()]
        await agents.close(WAIT_S)
        return said

    left = "the agent of left ended with exit code 255: no route to host"
    again = "; restarting it after 5 s"
    right = "the agent of right was killed by signal 9 (SIGKILL)"
    assert asyncio.run(asyncio.wait_for(work(), WAIT_S)) == [
        "[left] [w0] hello",
        "[left] no route to host",
        left + again,
        right,
        f"lost: no machine is left: {left} and {right}",
    ]
    command = rented.commands["right"]
    assert command.secret == "ws://secret@head:1"
    assert "secret" not in " ".join(command.words) + repr(command)
    assert command.words[-2:] == ("--workers", "2")


class Growing(Rented):
    """Gets a machine when the run wants more than three workers, at the second question."""

    is_elastic = True

    def __init__(self) -> None:
        super().__init__(Agent([]), Agent([]))
        self.asked: list[int] = []

    def ensure(self, num_workers: int, lost: Sequence[Machine]) -> list[Machine]:
        self.asked.append(num_workers)
        if len(self.asked) == 1:
            raise RuntimeError("the cluster does not answer")
        if num_workers > 3 and "more" not in self.agents:
            self.agents["more"] = Agent(["[w3] hello"])
            return [Machine(name="more", num_workers=1)]
        return []


def test_a_launcher_that_can_grow_is_asked_until_it_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LOOK_S", 0.01)
    monkeypatch.setattr(fleet, "VERDICT_S", 0.0)
    growing, seen = Growing(), Seen()

    async def work() -> list[str]:
        agents = Fleet(growing, [LEFT, RIGHT], "ws://head:1", "secret")
        agents.start(seen, seen.on_lost, seen.on_gone)
        agents.keep(4, ())
        said = [await seen.said.get(), await seen.said.get()]
        agents.keep(3, ())
        for agent in growing.agents.values():
            agent.end(0)
        said.append(await seen.said.get())
        await agents.close(WAIT_S)
        return said

    said = asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert said[0] == "no machine can be requested or released: RuntimeError: the cluster does not answer"
    assert said[1] == "[more] [w3] hello"
    assert said[2].startswith("lost: no machine is left: the agent of left ended with exit code 0")
    assert growing.commands["more"].words[-2:] == ("--workers", "1")
    assert growing.asked[:2] == [4, 4]


ELASTIC = """
    import sys
    from unisono.cluster import launchers
    from unisono.cluster.launchers import AgentProcess
    from unisono.core.settings import RunSettings
    from unisono.core.spec import RunSpec

    class Cluster(launchers.Launcher):
        is_elastic = True

        def __init__(self):
            self._started = []

        def machines(self):
            return [launchers.Machine(name=launchers.HERE, num_workers=1)]

        def ensure(self, num_workers, lost):
            alive = [process for process in self._started if process.exit_code is None]
            missing = num_workers - 1 - len(alive)
            names = range(len(self._started), len(self._started) + missing)
            return [launchers.Machine(name=f"node{number}", num_workers=1) for number in names]

        def start(self, machine, command):
            self._started.append(AgentProcess(command))
            return self._started[-1]

        def close(self):
            codes = [process.exit_code for process in self._started]
            print("exit codes of the agents:", codes, flush=True)

    spec = RunSpec(arguments=tuple(sys.argv[2:]), settings=RunSettings(run_dir=sys.argv[1]))
    sys.exit(launchers.run(spec, Cluster()))
    """


@pytest.mark.usefixtures("nursery")
def test_scale_gets_machines_and_gives_them_back(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path, mark: str
) -> None:
    """The bits are those of one worker; the agent that is not needed any more ends before the run."""
    calm = unisono("run", toy.TRAINING, "-n", 1, "--run-dir", tmp_path / "calm", "--", "--steps", 40)
    assert calm.wait() == 0, calm.err
    with Gates(tmp_path / "gates", (3, 20)) as gates:
        words = [script(ELASTIC), tmp_path / "run", toy.TRAINING, "--steps", 40, "--gates", gates.folder]
        command = Command([sys.executable, "-P", *map(str, words)], tmp_path, mark)
        try:
            gates.wait(3)
            assert unisono("scale", tmp_path / "run", 2).wait() == 0
            gates.open(3, command.generation("w1 joins; generation 2 with 2 workers"))
            gates.wait(20, workers=2)
            assert unisono("scale", tmp_path / "run", 1).wait() == 0
            gates.open(20, command.generation("w1 leaves"))
            command.line("is free again: the run wants 1 worker")
            assert command.wait() == 0, command.err
        finally:
            command.end()
    assert "exit codes of the agents: [0]" in command.out
    assert compare(tmp_path / "calm", tmp_path / "run").startswith("identical: 40 steps")


def test_the_agent_of_a_lost_machine_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause, and not where the head says that the machine needs none: its agent goes on without its ssh."""
    monkeypatch.setattr(fleet, "LOOK_S", 0.01)
    monkeypatch.setattr(fleet, "VERDICT_S", 0.0)
    monkeypatch.setattr(fleet, "FIRST_S", 0.5)
    rented, seen = Rented(Agent([]), Agent([])), Seen()

    async def work() -> list[str]:
        agents = Fleet(rented, [LEFT, RIGHT], "ws://head:1", "secret")
        agents.start(seen, seen.on_lost, seen.on_gone)
        agents.keep(3, ["left"])
        rented.agents["left"].end(255)
        said = [await seen.said.get()]
        rented.agents["left"] = Agent(["[w3] hello"])
        agents.keep(3, [])
        said += [await seen.said.get(), await seen.said.get()]
        rented.agents["left"].end(1)
        said.append(await seen.said.get())
        await agents.close(0.01)
        return said

    assert asyncio.run(asyncio.wait_for(work(), WAIT_S)) == [
        "the agent of left ended with exit code 255",
        "left is lost: restarting its agent after 0 s",
        "[left] [w3] hello",
        "the agent of left ended with exit code 1: [w3] hello; restarting it after 1 s",
    ]


def test_an_agent_that_does_not_end_with_the_run_is_asked_and_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TERMINATE_S", 0.01)
    rented, seen = Rented(Agent([]), Agent([])), Seen()

    async def work() -> None:
        agents = Fleet(rented, [LEFT, RIGHT], "ws://head:1", "secret")
        agents.start(seen, seen.on_lost, seen.on_gone)
        rented.agents["left"].end(0)
        await agents.close(0.01)

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert (rented.agents["left"].exit_code, rented.agents["right"].exit_code) == (0, -signal.SIGKILL)
    assert rented.agents["right"].is_asked
    assert seen.said.empty(), "the run is over: nobody is interested"


def test_the_local_launcher_hands_over_the_secret_and_leaves_nothing() -> None:
    launcher = LAUNCHERS["local"].build(Request(workers=parse_workers("3", 1), environment={}))
    assert [machine.num_workers for machine in launcher.machines()] == [3]
    echo = "import sys; print(sys.stdin.readline().strip()[::-1], flush=True); sys.stdin.read()"

    async def work() -> None:
        agent = launcher.start(LEFT, AgentCommand(words=(sys.executable, "-c", echo), secret="secret"))
        said: asyncio.Queue[str | int] = asyncio.Queue()
        agent.follow(said.put_nowait, said.put_nowait)
        assert await said.get() == "terces"
        assert agent.exit_code is None, "it waits for the end of its standard input"
        await agent.close()
        assert await said.get() == agent.exit_code == -signal.SIGKILL
        with pytest.raises(UsageError, match="nowhere cannot be started: No such file"):
            launcher.start(LEFT, AgentCommand(words=("nowhere",), secret="secret"))

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["int", "kill"])
def test_agents_end_with_the_command_that_has_started_them(number: signal.Signals, tmp_path: Path, mark: str) -> None:
    environment = {**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": str(toy.ROOT)}
    with subprocess.Popen(
        [sys.executable, "-P", toy.__file__, tmp_path / "run", FOR_EVER],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as command:
        assert command.stdout is not None
        try:
            for line in command.stdout:
                if "loss" in line:
                    break
            pids = marked(mark)
            assert len(pids) >= 4, "the command, the head and two agents"
            token = (tmp_path / "run" / "token").read_bytes()
            shown = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ")]
            assert not [text for text in shown if token in text]
            command.send_signal(number)
            command.stdout.read()
            assert command.wait(WAIT_S) == (130 if number is signal.SIGINT else -signal.SIGKILL)
        finally:
            command.kill()
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}


UNREACHABLE = """
    import sys
    from unisono.cluster import launchers
    from unisono.cluster.launchers import AgentProcess
    from unisono.core.spec import RunSpec

    class Unreachable(launchers.Launcher):
        def machines(self):
            return [launchers.Machine(name="left", num_workers=1)]

        def start(self, machine, command):
            return AgentProcess(command, before=sys.argv[1:])

    sys.exit(launchers.run(RunSpec(arguments=(__file__,)), Unreachable()))
    """


def run_unreachable(name: str, before: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, PARENT: str(os.getpid())}
    command = [sys.executable, "-P", name, *before]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.usefixtures("nursery")
def test_a_run_ends_where_no_machine_can_be_reached(script: Callable[[str], str], tmp_path: Path) -> None:
    done = run_unreachable(script(UNREACHABLE), ["sh", "-c", "echo no route to host; exit 255"], tmp_path)
    why = "the agent of left ended with exit code 255: no route to host"
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == ["[left] no route to host"]
    said = [line.partition("unisono: ")[2] for line in done.stderr.splitlines()]
    said = [line for line in said if not line.startswith("starting the workers")]  # it is said after a second
    assert said == [why, f"failed: no machine is left: {why}"]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("code", [5, 0])
def test_a_run_ends_although_another_process_keeps_the_output_of_its_last_agent_open(
    code: int, script: Callable[[str], str], tmp_path: Path, mark: str
) -> None:
    """A connection that is shared by several commands outlives each of them."""
    keeper = f"sleep {FOR_EVER} & echo $! > keeper; exit {code}"
    try:
        done = run_unreachable(script(UNREACHABLE), ["sh", "-c", keeper], tmp_path)
        assert done.returncode == 1, done.stderr
        assert f"no machine is left: the agent of left ended with exit code {code}" in done.stderr
    finally:
        os.kill(int((tmp_path / "keeper").read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("nursery")
def test_a_run_does_not_begin_where_an_agent_cannot_be_started(script: Callable[[str], str], tmp_path: Path) -> None:
    """The head, which is there already, ends (the fixture `mark` looks for it)."""
    done = run_unreachable(script(UNREACHABLE), ["nowhere"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("UsageError: nowhere cannot be started: No such file or directory")
