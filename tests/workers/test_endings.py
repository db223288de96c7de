"""How a run ends when somebody ends it, and what its standard streams have to do with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from websockets.asyncio.server import ServerConnection, serve

from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono
from tests.workers.gates import Gates
from unisono.cluster.machine import agent, headprocess, placement
from unisono.cluster.machine.children import PIPE_BYTES, Child, Output, spawn
from unisono.cluster.machine.placement import PLACEMENTS, Fork, Nursery
from unisono.cluster.machine.workers import WorkerProcesses, _Delayed, _Started
from unisono.core.errors import UsageError
from unisono.core.messages import AgentHello, Ended, RunDirectoryChosen, Welcome, WorkerExit, decode, encode
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.spec import MachineSpec, RunSpec, WorkerSpec
from unisono.record import checkpoint_files as files
from unisono.record import rundir
from unisono.record.history import History
from unisono.record.journal import JOURNAL
from unisono.system.lifetime import PARENT, Memory
from unisono.views.watch import EventStream
from unisono.views.watch.terminal import PlainTerminal

pytestmark = pytest.mark.usefixtures("nursery")

SCRIPT = Path(__file__).with_name("checkpointed_training.py")
ROOT = str(Path(__file__).resolve().parents[2])
FOR_EVER = ["--steps", 1_000_000, "--every", 0]
WITHOUT_CHECKPOINTS = """
    import torch, unisono

    with unisono.Run(seed=1) as run:
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs={epochs}):
            for batch in step:
                step.backward(model(batch).mean())
            if step.number == 3:
                print("did step 3", flush=True)
"""
Script = Callable[..., str]


def alarms(lines: list[str]) -> list[str]:
    """What sounds as if something had gone wrong by itself."""
    return [line for line in lines if "killed" in line or "replaces" in line or "Traceback" in line]


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")], ids=["int", "term"]
)
def test_a_signal_ends_the_run_on_all_machines_without_a_false_alarm(
    number: signal.Signals, reason: str, unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = unisono("run", script(WITHOUT_CHECKPOINTS.format(epochs=10**9)), "-n", 2, "--run-dir", run_dir)
    command.line("did step 3")
    guest = unisono(
        "join", json.loads((run_dir / "head.json").read_text())["url"], "--token-file", run_dir / "token", "-n", 1
    )
    command.line("w2 joins")
    os.kill(command.pid, number)
    assert command.wait() == 128 + number
    assert guest.wait() == 128 + number
    for line in (command.err[-1], guest.err[-1]):
        assert line.endswith(f" unisono: failed: {reason}")
    assert alarms([*command.err, *guest.err]) == []
    assert (History(run_dir).status()["state"], History(run_dir).status()["reason"]) == ("failed", reason)


def test_a_command_that_is_interrupted_waits_until_its_head_has_told_the_others() -> None:
    """Else a head that stands still for some seconds is ended before it has read why, and the others wait for it."""
    reached, goes_on = asyncio.Event(), asyncio.Event()

    async def stand_still(connection: ServerConnection) -> None:
        assert isinstance(decode(await connection.recv(decode=False)), AgentHello)
        await connection.send(encode(Welcome(run_id="x", heartbeat_s=0.5, agent_id="agent0")))
        ended = decode(await connection.recv(decode=False))
        assert isinstance(ended, Ended)
        reached.set()
        await goes_on.wait()
        await connection.send(encode(ended))
        await connection.wait_closed()

    async def interrupt() -> None:
        spec = MachineSpec(run=RunSpec(arguments=("train.py",), settings=RunSettings(start="spawn")), num_workers=1)
        head = cast(headprocess.HeadProcess, SimpleNamespace(start=lambda *_, **__: None, url="ws://lab:1"))
        with contextlib.closing(Memory("unisono-token")) as secret:
            async with serve(stand_still, "127.0.0.1", 0) as server:
                url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                own = agent._Agent(spec, url, "token", secret, EventStream([PlainTerminal()]), head, is_primary=True)
                running = asyncio.create_task(own.run())
                while not own._following.agent_id:
                    await asyncio.sleep(0)
                os.kill(os.getpid(), signal.SIGINT)
                await reached.wait()
                done, _ = await asyncio.wait({running}, timeout=2 * agent.LAST_WORDS_S)
                goes_on.set()
                assert not done
                assert await running == 128 + signal.SIGINT
                await own.close()

    asyncio.run(asyncio.wait_for(interrupt(), WAIT_S))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["int", "kill"])
def test_a_run_of_run_workers_ends_with_its_caller(
    number: signal.Signals, script: Script, tmp_path: Path, mark: str
) -> None:
    """After an exception before it is raised; after SIGKILL soon (the fixture `mark` looks for it)."""
    ending = f"import os, signal, sys\nos.kill(int(sys.argv[1]), {number:d})\nsignal.pause()"
    caller = f"""
        import os, pathlib, signal
        from unisono.testing import run_workers

        signal.signal(signal.SIGINT, signal.default_int_handler)
        del os.environ[{PARENT!r}]  # this program's own
        try:
            run_workers({script(ending)!r}, 1, directory="run", arguments=[str(os.getpid())])
        except KeyboardInterrupt:
            pid = os.getpid()
            print("children:", pathlib.Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split())
        """
    command = Command([sys.executable, script(caller, "caller.py")], tmp_path, mark)
    try:
        if number is signal.SIGINT:
            assert command.line("children:") == "children: []"
            assert command.wait() == 0
        else:
            assert command.wait() == -number
    finally:
        command.end()


def test_under_nohup_a_run_outlives_its_terminal(unisono: Unisono, script: Script) -> None:
    hang_up = (
        "import os, signal\nfrom unisono.cluster.worker import member\nos.kill(member.spec().agent, signal.SIGHUP)\n"
    )
    command = unisono(
        "run", script(hang_up + textwrap.dedent(WITHOUT_CHECKPOINTS.format(epochs=20))), "-n", 1, before=["nohup"]
    )
    assert command.wait() == 0, command.err
    command.line("finished: 20 steps")


def test_an_interrupted_run_writes_a_checkpoint_and_says_how_to_go_on(unisono: Unisono, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = unisono("run", SCRIPT, "-n", 2, "--run-dir", run_dir, "--", *FOR_EVER)
    command.line("did step 3")
    command.line(" steps  loss ")  # so the command has heard before what a signal is to do
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 128 + signal.SIGINT
    (checkpoint,) = files.complete(run_dir / files.FOLDER)
    files.verify(checkpoint)
    assert alarms(command.err) == []
    assert len([line for line in command.err if "interrupted, with a checkpoint" in line]) == 1
    hint = command.line("to resume from it: ")
    assert checkpoint.name in hint
    _, *words = shlex.split(hint.partition("to resume from it: ")[2])
    more = ["--steps", str(int(checkpoint.name.removeprefix("step-")) + 1)]
    again = unisono(*words, SCRIPT, "--", *more)
    assert again.wait() == 0, again.err
    again.line("did step")


def test_a_full_disk_behind_standard_output_costs_lines_and_nothing_else(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    name = script(WITHOUT_CHECKPOINTS.format(epochs=20))
    command = unisono("run", name, "-n", 2, before=["sh", "-c", 'exec "$@" > /dev/full', "sh"])
    assert command.wait() == 0, command.err
    said = [line for line in command.err if "standard output cannot be written" in line]
    assert len(said) == 1
    assert "No space left on device" in said[0]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, unisono: Unisono, script: Script, tmp_path: Path) -> None:
    name = script(WITHOUT_CHECKPOINTS.format(epochs=5))
    run_dir = tmp_path / "run"
    command = unisono("run", name, "-n", 1, "--run-dir", run_dir, before=["sh", "-c", f'exec "$@" {closed}', "sh"])
    assert command.wait() == 0, command.err
    assert History(run_dir).status()["state"] == "finished"


WITHOUT_STREAMS = """
    import io, os, sys
    from unisono.cluster.worker import member

    class Broken:
        def write(self, text):
            raise RuntimeError("not this one")

    closed = io.StringIO()
    closed.close()
    sys.stdout = sys.stderr = {"w0": None, "w1": closed, "w2": Broken()}[member.spec().worker_id]
"""


def test_a_script_that_leaves_no_standard_streams_has_success(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    """None, one that is closed, and one that can do nothing."""
    training = textwrap.dedent(WITHOUT_CHECKPOINTS.format(epochs=5)).replace("print(", "(lambda *_, **__: 0)(")
    command = unisono("run", script(textwrap.dedent(WITHOUT_STREAMS) + training), "-n", 3, "--run-dir", "run")
    assert command.wait() == 0, command.err
    assert History(tmp_path / "run").status()["state"] == "finished"
    assert [line for line in command.err if line.startswith("[w") or "ended" in line] == [], "nobody was lost"


def test_a_flood_does_not_hold_up_the_end_of_a_worker() -> None:
    """A process of a session of its own has the worker's output as well, and writes faster than it is shown."""
    line = b"x" * 32_767 + b"\n"

    async def drain() -> int:
        (out, out_end), (error, error_end) = os.pipe(), os.pipe()
        num_lines = 0

        def on_line(text: str, is_error: bool) -> None:
            nonlocal num_lines
            num_lines += 1
            assert num_lines < 100
            os.write(out_end, line)

        output = Output((out, error), on_line)
        os.write(out_end, line)
        output.drain()
        with pytest.raises(BrokenPipeError):
            os.write(out_end, line)
        os.close(out_end)
        os.close(error_end)
        return num_lines

    assert asyncio.run(drain()) == PIPE_BYTES // len(line)


def test_launch_with_closed_standard_streams(script: Script, tmp_path: Path) -> None:
    name = script("""
        import os
        from pathlib import Path

        import unisono

        def main():
            print("said")
            return "returned"

        os.closerange(0, 3)
        Path("result").write_text(unisono.launch(main, workers=1))
    """)
    subprocess.run([sys.executable, name], cwd=tmp_path, timeout=WAIT_S, check=True)
    assert (tmp_path / "result").read_text() == "returned"


def test_a_script_knows_where_it_is_after_it_has_changed_the_directory(unisono: Unisono, script: Script) -> None:
    name = script("import os\nos.chdir('/')\nprint(open(__file__).readline(), __file__)\nraise SystemExit(3)\n")
    command = unisono("run", name, "-n", 1)
    assert command.wait() == 3
    assert any("import os" in line for line in command.out)


def test_variables_that_are_not_text_and_large(
    unisono: Unisono, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environb, b"PLACE", b"caf\xe9")
    for number in range(4):  # and more of them than a socket takes at once
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    name = script("import os\nprint('got', os.environb[b'PLACE'], len(os.environ['LARGE_3']))\n")
    command = unisono("run", name, "-n", 1)
    command.line(r"got b'caf\xe9' 100000")
    assert command.wait() == 0


def test_a_nursery_that_is_not_there_is_one_line(
    unisono: Unisono, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_NURSERY", "nowhere")
    command = unisono("run", script("print('ran')"), "-n", 1)
    assert command.wait() == 2
    assert command.err == ["unisono: no nursery answers at UNISONO_NURSERY=nowhere: No such file or directory"]


WITHOUT_FILES = """
    import json, os, resource, signal, sys, torch, unisono
    from pathlib import Path
    from unisono.cluster.worker import member
    sys.path.insert(0, {root!r})
    from tests.workers.gates import wait_at

    with unisono.Run(seed=1) as run:
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=20):
            wait_at(Path("gates") / str(step.number))
            for batch in step:
                step.backward(model(batch).mean())
            if step.number == 3 and member.spec().worker_id == "w1":
                # The agent can open nothing more. What it has open stays.
                resource.prlimit(member.spec().agent, resource.RLIMIT_NOFILE, (3, 3))
                if {head}:
                    os.kill(json.load(open(run.directory / "head.json"))["pid"], signal.SIGKILL)
                os._exit(1)
"""


def test_a_worker_that_cannot_be_started_is_told_and_the_others_go_on(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    name = script(WITHOUT_FILES.format(root=ROOT, head=False))
    with Gates(tmp_path / "gates", [5]) as held:
        command = unisono("run", name, "-n", 2)
        command.line("it could not be started: [Errno 24] Too many open files; see the limits of processes, open files")
        held.open(5)
        assert command.wait() == 0, command.err


def test_a_head_that_cannot_be_started_again_ends_the_run_in_words(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    name = script(WITHOUT_FILES.format(root=ROOT, head=True))
    command = unisono("run", name, "-n", 2, "--run-dir", run_dir)
    assert command.wait() == 1
    command.line("was killed by signal 9 (SIGKILL); another one could not be started: [Errno 24]")
    assert not any("Traceback" in line for line in command.err)


def test_a_limit_on_the_size_of_files_ends_the_run_in_words(unisono: Unisono, script: Script) -> None:
    """Shared memory counts as a file. That it cannot be made is nobody's loss, and is not tried again and again."""
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    command = unisono("run", script(limited + textwrap.dedent(WITHOUT_CHECKPOINTS).format(epochs=2)), "-n", 2)
    assert command.wait() == 1
    command.line("bytes of shared memory: File too large (the limit is 200,000 bytes); ulimit -f shows")
    assert not any("trying again" in line for line in command.err)


class SlowNursery:
    """Answers a request to fork a worker when the test says so."""

    def __init__(self) -> None:
        self.is_alive = True
        self.requests: dict[str, Callable[[Child | OSError], None]] = {}

    def fork(self, spec: WorkerSpec, environment: object, on_started: Callable[..., None]) -> None:
        assert spec.worker_id not in self.requests
        self.requests[spec.worker_id] = on_started

    async def close(self) -> None:
        self.is_alive = False


class Exits:
    """Keeps the ends of workers that are reported to the head."""

    def __init__(self) -> None:
        self.messages: list[WorkerExit] = []

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        pass

    def on_exit(self, message: WorkerExit) -> None:
        self.messages.append(message)

    def on_notice(self, text: str) -> None:
        pass


def workers_of(nursery: SlowNursery, secret: Memory, exits: Exits) -> WorkerProcesses:
    spec = MachineSpec(run=RunSpec(arguments=("train.py",)), num_workers=1)
    workers = WorkerProcesses(
        spec, head="ws://127.0.0.1:1", host="lab", secret=secret, listener=exits, on_exit=exits.on_exit
    )
    placement = workers._placement
    assert isinstance(placement, Fork)
    placement._nursery = cast(Nursery, nursery)
    return workers


def test_a_worker_that_is_not_there_yet_is_evicted_as_well() -> None:
    """One that is being forked ends when it is there, one whose start is delayed does not begin."""

    async def evict() -> None:
        nursery = SlowNursery()
        with Memory("unisono-token") as secret:
            workers = workers_of(nursery, secret, Exits())
        child = spawn("w1", [sys.executable, "-c", "import signal; signal.pause()"], os.environ, ())
        try:
            for _ in range(2):  # the second time by a head that follows one that has died
                workers.start(["w1"])
                workers.start(["w2"], delay_s=60.0)
            delayed = workers._states["w2"]
            for worker_id in ("w1", "w2"):
                workers.evict(worker_id)
            nursery.requests["w1"](child)
            assert await child.ended_within(WAIT_S)
            assert child.exit_code == -signal.SIGKILL
            assert isinstance(delayed, _Delayed)
            assert delayed.timer.cancelled()
            assert list(nursery.requests) == ["w1"]
        finally:
            child.kill()
            await child.ended_within(WAIT_S)
            await workers.close()

    asyncio.run(evict())


def test_a_worker_that_the_nursery_did_not_live_to_fork_starts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has failed that would count as a restart."""

    async def start() -> None:
        nursery, exits = SlowNursery(), Exits()
        children = []

        def start_pausing(name: str, command: list[str], *_: object, **__: object) -> Child:
            assert command[-1] == "train.py"
            children.append(spawn(name, [sys.executable, "-c", "import signal; signal.pause()"], os.environ, ()))
            return children[-1]

        monkeypatch.setattr(placement, "spawn", start_pausing)
        with Memory("unisono-token") as secret:
            workers = workers_of(nursery, secret, exits)
            workers.start(["w1"])
            nursery.is_alive = False
            nursery.requests["w1"](OSError("the nursery has ended"))
        (child,) = children
        assert workers.running() == ["w1"]
        assert exits.messages == []
        child.kill()
        assert await child.ended_within(WAIT_S)
        await workers.close()

    asyncio.run(start())


def test_a_replacement_takes_the_local_rank_of_the_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it takes the GPU that is free. A worker that could not be started leaves no rank behind."""
    specs: list[WorkerSpec] = []

    class Pausing:
        """Starts a process for each worker, but for w1."""

        def __init__(self, *_: object) -> None:
            pass

        def open(self) -> None:
            pass

        def start(self, spec: WorkerSpec, on_started: Callable[[Child | OSError], None]) -> None:
            specs.append(spec)
            if spec.worker_id == "w1":
                on_started(OSError("no room"))
            else:
                command = [sys.executable, "-c", "import signal; signal.pause()"]
                on_started(spawn(spec.worker_id, command, os.environ, ()))

        async def close(self) -> None:
            pass

    async def start() -> None:
        monkeypatch.setitem(cast(Any, PLACEMENTS), "fork", Pausing)
        exits = Exits()
        spec = MachineSpec(run=RunSpec(arguments=("train.py",)), num_workers=2)
        with Memory("unisono-token") as secret:
            workers = WorkerProcesses(
                spec, head="ws://127.0.0.1:1", host="lab", secret=secret, listener=exits, on_exit=exits.on_exit
            )
            workers.start(["w0", "w1", "w2"])
            first = workers._states["w0"]
            assert isinstance(first, _Started)
            first.child.kill()
            assert await first.child.ended_within(WAIT_S)
            workers.start(["w3", "w4"])
            assert workers.running() == ["w2", "w3", "w4"]
            await workers.close()
            assert workers.running() == []
        assert [(spec.worker_id, spec.local_rank) for spec in specs] == [
            ("w0", 0), ("w1", 1), ("w2", 1), ("w3", 0), ("w4", 2)
        ]  # fmt: skip
        assert [(message.worker_id, message.exit_code) for message in exits.messages] == [("w1", 1)]
        assert "could not be started: no room" in exits.messages[0].last_output

    asyncio.run(start())


@pytest.mark.parametrize("name", ["another run", "this run"])
def test_nothing_is_written_into_the_directory_of_another_run_under_the_same_name(name: str, tmp_path: Path) -> None:
    """The run's directory was moved, and another run was started where it had been."""
    rundir.describe(tmp_path, {"run_id": name})
    (tmp_path / JOURNAL).write_text("")
    (tmp_path / files.FOLDER / files.step_name(4)).mkdir(parents=True)
    (tmp_path / files.FOLDER / files.step_name(4) / files.MANIFEST).write_text("{}")
    ended = Ended(ok=False, reason="all are gone", exit_code=1)

    async def end() -> str:
        spec = MachineSpec(run=RunSpec(arguments=("train.py",)), num_workers=1)
        with contextlib.closing(Memory("unisono-token")) as secret:
            head = cast(headprocess.HeadProcess, object())
            own = agent._Agent(
                spec, "ws://127.0.0.1:1", "token", secret, EventStream([PlainTerminal()]), head, is_primary=True
            )
        own._following.run_id = "this run"
        own.receive(RunDirectoryChosen(path=str(tmp_path)))
        own._conclude(ended)
        own._chronicle.close()
        await own.close()
        return own._how_to_go_on(ended)

    hint = asyncio.run(end())
    is_own = name == "this run"
    assert ("all are gone" in (tmp_path / JOURNAL).read_text()) == is_own
    assert ("--resume" in hint) == is_own


def test_a_head_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it needs no folder for temporary files: one is missing, or full, where a run has to go on."""

    def spawn(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(headprocess, "spawn", spawn)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    spec = MachineSpec(run=RunSpec(arguments=("train.py",)), num_workers=1)
    with pytest.raises(UsageError, match=r"could not be started: \[Errno \d+\] Resource temporarily unavailable; see"):
        agent.run(spec, headprocess.Service(policy=Policy(start=1, maximum=1)))
