"""The holder at the far end of a connection: what it runs ends with it, whatever that does."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import marked, wait_until_gone
from unisono.cluster.machine.holder import CANNOT_START, HolderOrder

pytestmark = pytest.mark.more

STUBBORN = 'trap "" TERM HUP INT; echo ready; exec sleep 1000000'
IMPATIENT = """
import sys
from unisono.cluster.machine import holder
holder.TERMINATE_S = holder.LOSE_S = 0.1
sys.exit(holder.main())
"""
FAMILY = f"""
import subprocess, sys
subprocess.Popen(["setsid", "sh", "-c", {STUBBORN!r}])
middle = "import os, subprocess; subprocess.Popen(['sh', '-c', {STUBBORN!r}], start_new_session=True); os._exit(0)"
subprocess.run([sys.executable, "-c", middle])
print(input(), flush=True)
if len(sys.argv) == 1:
    sys.stdin.read()
"""


@contextmanager
def held(*words: str, lock: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", IMPATIENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(HolderOrder(words, variables, lock).encode() + "\nthe secret\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], number: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(number))


def test_the_command_gets_its_input_and_gives_its_exit_code() -> None:
    with held("sh", "-c", 'read line; echo "$line, $WORD" >&2; exit 7', WORD="and a word") as process:
        assert lines(process, 1) == ["the secret, and a word"]
        assert process.wait(WAIT_S) == 7
    with held("sh", "-c", "kill -9 $$") as process:
        assert process.wait(WAIT_S) == 128 + signal.SIGKILL
    with held("/nowhere/command") as process:
        assert lines(process, 1) == ["/nowhere/command cannot be started: No such file or directory"]
        assert process.wait(WAIT_S) == CANNOT_START


@pytest.mark.parametrize("way", ["end of input", "SIGTERM", "SIGHUP", "end of the command"])
def test_nothing_outlives_the_holder(way: str, mark: str) -> None:
    """Neither a process in a session of its own, nor one whose parent has ended, though both ignore SIGTERM."""
    arguments = ("and", "end") if way == "end of the command" else ()
    with held(sys.executable, "-c", FAMILY, *arguments) as process:
        assert lines(process, 3) == ["ready", "ready", "the secret"]
        assert process.stdin is not None
        if way == "end of input":
            process.stdin.close()
        elif way.startswith("SIG"):
            process.send_signal(signal.Signals[way])
        assert process.wait(WAIT_S) == 0, "the command has ended by itself: it saw the end of its input"
        assert marked(mark) == {}


def test_a_command_that_does_not_end_by_itself_is_ended(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "IMPATIENT", IMPATIENT.replace("holder.TERM", "holder.COMMAND_S = holder.TERM"))
    with held("sh", "-c", STUBBORN) as process:
        assert lines(process, 1) == ["ready"]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WAIT_S) == 1
        assert marked(mark) == {}


LOSER = """
import subprocess, sys
subprocess.run([sys.executable, "-P", "-c", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("answer", "shown", "command_s"),
    [
        ("echo ends", ["ends"], 3.0),
        ("echo hangs; cat >/dev/null; exec sleep 1000000", ["hangs"], 1.0),
        # The holder waits long enough for a shell on a busy machine, and less long than the command takes.
        ("exec 0<&-; echo goes on; sleep 4; echo has ended by itself", ["goes on", "has ended by itself"], 3.0),
    ],
)
def test_a_command_hears_of_a_lost_connection_and_may_go_on(
    answer: str, shown: list[str], command_s: float, mark: str
) -> None:
    """The connection is lost where the process that serves it has ended, too. A command that does nothing is ended."""
    program = IMPATIENT.replace("holder.TERM", f"holder.COMMAND_S = {command_s}; holder.TERM")
    server = [sys.executable, "-P", "-c", LOSER, program]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        script = f'read secret; echo ready; read line; test "$line" = lost && {{ {answer}; }}'
        process.stdin.write(HolderOrder(["sh", "-c", script]).encode() + "\nthe secret\n")
        process.stdin.flush()
        assert lines(process, 1) == ["ready"]
        process.kill()
        process.stdin.close()
        assert process.stdout.read().splitlines() == shown
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}


def test_a_holder_without_an_order_ends() -> None:
    command = [sys.executable, "-P", "-m", "unisono.cluster.machine.holder"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_the_command_hears_that_its_holder_was_killed(mark: str) -> None:
    with held("sh", "-c", "echo ready; cat >/dev/null") as process:
        lines(process, 1)
        process.kill()
        process.wait(WAIT_S)
        wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
        assert marked(mark) == {}


def test_a_folder_is_locked_as_long_as_the_command_runs(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held("sh", "-c", "echo ready; cat >/dev/null", lock=str(path)) as process:
        lines(process, 1)
        with path.open("r+") as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(WAIT_S)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_holder_starts_at_once() -> None:
    """It loads none of what the command may need."""
    code = "import sys, unisono.cluster.machine.holder; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert not {"torch", "numpy", "msgspec", "click", "asyncio", "rich"} & set(done.stdout.split())
