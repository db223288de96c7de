"""`unisono.system.lifetime.run_bound`: a command of others ends at its limit and with its caller, and what it has
started.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import wait_until_gone
from unisono.system.lifetime import Done, run_bound

HANGS = "trap '' TERM; sleep 1000003 & echo $$ $! > {}; wait"


def pids_in(file: Path) -> set[int]:
    return set(map(int, file.read_text().split()))


def test_the_command_gets_its_input_and_says_how_it_has_ended() -> None:
    done = run_bound(["sh", "-c", "cat; echo no >&2; exit 3"], WAIT_S, given=b"hello\xff")
    assert done == Done(3, b"hello\xff", "no\n")
    assert done.output == "hello\ufffd"
    assert run_bound(["sh", "-c", "kill -9 $$"], WAIT_S).code == -signal.SIGKILL
    with open("/dev/null", "rb") as nothing:
        assert run_bound(["cat"], WAIT_S, given=nothing) == Done(0, b"", "")
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'nowhere'"):
        run_bound(["nowhere"], WAIT_S)


def test_a_command_that_takes_too_long_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    done = run_bound(["sh", "-c", HANGS.format(shlex.quote(str(tmp_path / "pids")))], 0.5)
    assert done.code is None
    wait_until_gone(pids_in(tmp_path / "pids"), time.monotonic() + WAIT_S)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    done = run_bound(["sh", "-c", f"sleep 1000004 >/dev/null 2>&1 & echo $! > {shlex.quote(str(file))}"], WAIT_S)
    assert done.code == 0
    wait_until_gone(pids_in(file), time.monotonic() + WAIT_S)


def test_a_command_ends_with_its_caller_that_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    program = f"from unisono.system.lifetime import run_bound\nrun_bound(['sh', '-c', {HANGS.format(fifo)!r}], 1e6)"
    with subprocess.Popen([sys.executable, "-c", program]) as caller:
        pids = pids_in(fifo)
        caller.kill()
    wait_until_gone(pids, time.monotonic() + WAIT_S)
