"""The process that forks workers ends before them, or with their agent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono, marked, wait_until_gone
from tests.workers.gates import Gates
from unisono.cli.reach import ask_status, find
from unisono.cluster.machine.children import Child
from unisono.cluster.machine.forking import Forked, ForkRequest, WorkerEnded
from unisono.cluster.machine.placement import Nursery
from unisono.core.spec import WorkerSpec
from unisono.record.journal import compare
from unisono.record.journal.times import by_step
from unisono.system.lifetime import Memory
from unisono.testing import run_workers

pytestmark = pytest.mark.more

TRAINING = Path(__file__).with_name("small_training.py")
STEPS = 12
NEVER_S = 10 * WAIT_S
"""In no test."""
Script = Callable[..., str]


def parent_and_name(process: Path) -> tuple[int, str]:
    try:
        text = (process / "stat").read_text()
    except OSError:
        return 0, ""
    name, _, rest = text.partition("(")[2].rpartition(")")
    return int(rest.split()[1]), name


def children(parent: int, name: str) -> set[int]:
    """The children of a process that have this name."""
    found = {int(entry.name): parent_and_name(entry) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
    return {pid for pid, known in found.items() if known == (parent, name)}


def test_a_run_survives_its_nursery(unisono: Unisono, tmp_path: Path) -> None:
    """The workers go on, one that is lost then is replaced by one that starts by itself, and no bit is another."""
    calm = run_workers(TRAINING, 1, directory=tmp_path / "calm", arguments=["--steps", str(STEPS)])
    assert calm.exit_code == 0, calm.output
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (3, 6, 9)) as gates:
        options = ["-n", 2, "--run-dir", run_dir, "--", "--steps", STEPS, "--gates", gates.folder]
        command = unisono("run", TRAINING, *options)
        gates.wait(3)
        (nursery,) = children(command.pid, "unisono nursery")
        os.kill(nursery, signal.SIGKILL)
        command.line(
            f"the nursery (pid {nursery}), which forks workers, has ended; the workers continue, and later ones start "
            "without it"
        )
        gates.open(3)
        gates.wait(6)
        before = {worker["worker_id"]: worker["pid"] for worker in ask_status(find(str(run_dir)))["workers"]}
        assert children(command.pid, "unisono w0") | children(command.pid, "unisono w1") == set(before.values())
        os.kill(before["w1"], signal.SIGKILL)
        gates.open(6)
        command.line("w1 (pid")
        gates.wait(9)
        gates.open(9, command.generation("w2 joins"))
        assert command.wait() == 0, command.err
    assert compare(tmp_path / "calm", run_dir).startswith(f"identical: {STEPS} steps")
    assert not [line for line in command.err if "w0 (pid" in line], "nobody else was lost"
    assert [len(workers) for workers in by_step(run_dir).values()][-1] == 2


# One worker waits, one is stopped, one hangs in C and keeps the interpreter; each has a child.
HANGS = """
    import ctypes, os, signal, subprocess, sys
    from unisono.cluster.worker import member

    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    me = member.current()
    me.ready(0)
    me.holding(me.wait_notice(0).generation)
    print("training", flush=True)
    if me.worker_id == "w1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if me.worker_id == "w2":
        ctypes.PyDLL(None).pause()
    me.wait_notice(100)
"""


def test_nothing_outlives_a_command_whose_nursery_has_ended(unisono: Unisono, script: Script, mark: str) -> None:
    """After a SIGKILL as well, whatever the workers do."""
    patience = [
        word for name in ("heartbeat-timeout", "head-away", "kill-after") for word in ("--set", f"{name}={NEVER_S}s")
    ]
    command = unisono("run", script(HANGS), "-n", 3, *patience)  # nobody ends for having waited for long
    for worker in ("w0", "w1", "w2"):
        command.line(f"[{worker}] training")
    (nursery,) = children(command.pid, "unisono nursery")
    os.kill(nursery, signal.SIGKILL)
    command.line(f"the nursery (pid {nursery})")
    assert len(marked(mark)) == 8, "command, head, three workers and a child of each"
    command.process.kill()
    command.wait()
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}


def test_a_worker_does_nothing_before_its_agent_knows_of_it(standing_nursery: str, tmp_path: Path) -> None:
    """An agent that does not hear of a fork, because the nursery has ended, starts another with the same name."""
    request = ForkRequest.of("w0", ["train.py"], {}, str(tmp_path))
    gate, key = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.settimeout(WAIT_S)
        agent.connect(standing_nursery)
        try:
            request.send(agent, [null, null, null, null, gate])
            forked = msgspec.msgpack.decode(agent.recv(1 << 16), type=Forked)
        finally:
            for descriptor in (null, gate, key):
                os.close(descriptor)
        ended = msgspec.msgpack.decode(agent.recv(1 << 16), type=WorkerEnded)
    assert (ended.pid, ended.exit_code) == (forked.pid, 1)


class Ended:
    """Waits for the sentence in which the end of the nursery is reported."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        pass

    def on_notice(self, text: str) -> None:
        asyncio.get_running_loop().call_soon(self.event.set)


def test_a_fork_that_the_nursery_did_not_live_to_make_is_reported(mark: str) -> None:
    async def fork() -> list[Child | OSError]:
        with Memory("unisono-token") as secret:
            ended = Ended()
            nursery = Nursery(os.environ, secret, ended, lambda child: None)
            assert nursery.child is not None
            os.kill(nursery.child.pid, signal.SIGSTOP)
            results: list[Child | OSError] = []
            nursery.fork(WorkerSpec(worker_id="w0"), os.environ, results.append)
            nursery.child.kill()
            async with asyncio.timeout(WAIT_S):
                await ended.event.wait()
            assert not nursery.is_alive
            await nursery.close()
        return results

    assert [str(result) for result in asyncio.run(fork())] == ["the nursery has ended"]


def test_what_a_worker_leaves_to_its_agent_is_reaped(unisono: Unisono, script: Script) -> None:
    """An orphan of the script that ends does not stay as a zombie: the command, which adopts it, waits for it."""
    orphans = """
        import os, sys, time
        from pathlib import Path
        from unisono.cluster.worker import member

        reading, writing = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(writing, str(os.getpid()).encode())
            os._exit(0)
        os.wait()
        orphan = Path("/proc", os.read(reading, 20).decode())
        deadline = time.monotonic() + 200
        while orphan.exists():
            assert time.monotonic() < deadline, orphan.joinpath("status").read_text()
            os.sched_yield()
        me = member.current()
        me.ready(0)
        me.holding(me.wait_notice(0).generation)
        """
    command = unisono("run", script(orphans), "-n", 1)
    assert command.wait() == 0, command.err


LEAVES = """
    import atexit, ctypes, sys, zipfile

    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p  # memory that nobody frees
    word = ctypes.c_void_p(libc.strdup(b"the interpreter was shut down"))
    libc.__cxa_atexit(ctypes.cast(libc.puts, ctypes.c_void_p), word, None)
    libc.printf(b"from native code\\n")
    if sys.argv[1] == "a file":
        file = zipfile.ZipFile("a file", "w")
        file.writestr("name", "text")
    elif sys.argv[1] == "a generator":
        def write():
            try:
                yield
            finally:
                print("its last words")
        next(generator := write())
    atexit.register(print, "at exit")
    """


@pytest.mark.parametrize("left", ["nothing", "a file", "a generator"])
@pytest.mark.usefixtures("nursery")
def test_the_interpreter_is_shut_down_only_where_that_does_something(
    left: str, unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    run = unisono("run", "-n", 1, script(LEAVES), "--", left)
    assert run.wait() == 0, run.err
    assert "[w0] from native code" in run.out
    assert "[w0] at exit" in run.out
    assert ("[w0] the interpreter was shut down" in run.out) == (left != "nothing")
    if left == "a file":
        assert zipfile.ZipFile(tmp_path / left).read("name") == b"text"
    if left == "a generator":
        assert "[w0] its last words" in run.out


PROBES = """
    from unisono.system import probe

    found = probe.results()
    is_taken = bool(probe._taken)
    probe._taken.clear()
    probe.results.cache_clear()
    print(is_taken, found == probe.results())
    """


@pytest.mark.usefixtures("nursery")
def test_the_nursery_computes_the_probe_for_workers_whose_libraries_choose_as_its_own(
    unisono: Unisono, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = unisono("run", "-n", 1, script(PROBES))
    assert run.wait() == 0, run.err
    assert "[w0] True True" in run.out
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    run = unisono("run", "-n", 1, script(PROBES))
    assert run.wait() == 0, run.err
    assert "[w0] False True" in run.out
