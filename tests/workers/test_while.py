"""`unisono join --while COMMAND`: a machine takes part as long as a command of the user exits with 0."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono, marked, wait_until_gone
from tests.workers.gates import Gates
from unisono.cluster.machine import condition
from unisono.record.journal import compare
from unisono.record.journal.times import by_step

SCRIPT = Path(__file__).with_name("small_training.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "nobody_uses_it.py"
STEPS = 60


def answers(command: str, number: int, limit_s: float = WAIT_S) -> list[tuple[bool, str]]:
    """The first changes of a condition."""
    found: list[tuple[bool, str]] = []

    async def ask() -> None:
        enough = asyncio.Event()

        def on_change(holds: bool, why: str) -> None:
            found.append((holds, why))
            if len(found) == number:
                enough.set()

        task = asyncio.create_task(condition.watch_condition(command, on_change))
        async with asyncio.timeout(WAIT_S):
            await enough.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(condition, "EVERY_S", 0.01)
        patch.setattr(condition, "LIMIT_S", limit_s)
        asyncio.run(ask())
    return found


def test_the_last_line_of_the_command_is_the_reason(tmp_path: Path) -> None:
    flag = shlex.quote(str(tmp_path / "flag"))
    command = f"if test -e {flag}; then echo; echo 'it is there' >&2; exit 3; fi; touch {flag}"
    assert answers(command, 2) == [(True, f"`{command}` ended with exit code 0"), (False, "it is there")]


def test_a_command_that_is_not_there_does_not_hold() -> None:
    [(holds, why)] = answers("nothing-of-that-name", 1)
    assert not holds
    assert "nothing-of-that-name" in why
    assert "not found" in why


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 1000001 & echo $! $$ > {shlex.quote(str(pids))}; trap '' TERM; wait"
    assert answers(command, 1, limit_s=0.5) == [(False, f"`{command}` has not ended within 0.5 s")]
    wait_until_gone(set(map(int, pids.read_text().split())), time.monotonic() + WAIT_S)


def example(*words: str, path: str = "") -> tuple[int, str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    command = [sys.executable, str(EXAMPLE), "--cores", "1000000", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment)
    return done.returncode, done.stdout


def test_the_example_looks_at_files_and_terminals(tmp_path: Path) -> None:
    seen, (ours, theirs) = tmp_path / "seen", os.openpty()
    try:
        assert example("--input", str(seen))[0] == 0
        seen.touch()
        assert example("--input", str(seen))[0] == 1
        os.utime(seen, (0, 0))
        assert example("--input", str(seen))[0] == 0
        os.utime(os.ttyname(theirs), (time.time(), 0))
        code, said = example("--input", str(seen), "--input", os.ttyname(theirs))
        assert code == 1
        assert said.startswith("somebody has used this machine ")
    finally:
        os.close(ours)
        os.close(theirs)


LOGINCTL = """#!/bin/sh
if [ "$1" = list-sessions ]; then echo "  3 1000 ada seat0 tty2"; else
printf 'Type=wayland\\nClass=user\\nIdleHint={hint}\\nIdleSinceHint=300000000\\n'; fi
"""


def test_the_example_asks_logind_for_graphical_sessions(tmp_path: Path) -> None:
    program = f"import runpy; found = runpy.run_path({str(EXAMPLE)!r}); print(found['session_at']())"
    path = f"{tmp_path}:{os.environ['PATH']}"
    for hint, is_used in (("no", True), ("yes", False)):
        (tmp_path / "loginctl").write_text(LOGINCTL.format(hint=hint))
        (tmp_path / "loginctl").chmod(0o755)
        command = [sys.executable, "-c", program]
        said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path})
        assert (float(said.stdout) > 300.0) == is_used


@pytest.mark.usefixtures("nursery")
def test_a_machine_joins_while_the_command_holds_and_leaves_within_a_step(unisono: Unisono, tmp_path: Path) -> None:
    calm = unisono("run", SCRIPT, "-n", 1, "--run-dir", tmp_path / "calm", "--", "--steps", STEPS)
    assert calm.wait() == 0, calm.err
    run_dir, used = tmp_path / "run", tmp_path / "used"
    with Gates(tmp_path / "gates", (3, 20, 40)) as gates:
        place = ("--", "--steps", STEPS, "--gates", gates.folder)
        command = unisono("run", SCRIPT, "-n", 1, "--run-dir", run_dir, *place)
        gates.wait(3)
        used.touch()
        url = json.loads((run_dir / "head.json").read_text())["url"]
        lent = ("--while", f"if test -e {shlex.quote(str(used))}; then echo somebody uses it; exit 1; fi; echo free")
        guest = unisono("join", url, "--token-file", run_dir / "token", "-n", 1, *lent)
        command.line("joins, and offers workers only at certain times (--while)")
        guest.line("this machine's workers are waiting: somebody uses it")
        used.unlink()
        command.line("offers 1 worker: ")
        gates.open(3, command.generation("w1 joins"))
        gates.wait(20, workers=2)
        used.touch()
        gates.open(20, command.generation("somebody uses it; w1 leaves"))
        gates.wait(40)
        used.unlink()
        gates.open(40, command.generation("w2 joins"))
        assert command.wait() == 0, command.err
        assert guest.wait() == 0, guest.err
    assert compare(tmp_path / "calm", run_dir).startswith(f"identical: {STEPS} steps")
    sizes = [len(workers) for workers in by_step(run_dir).values()]
    assert sizes[:4] == [1, 1, 1, 1]
    assert sizes[19] == 2
    assert sizes[21] == 1
    assert sizes[-1] == 2


@pytest.mark.usefixtures("nursery")
def test_a_command_that_hangs_ends_with_an_agent_that_is_killed(unisono: Unisono, tmp_path: Path, mark: str) -> None:
    run_dir, pids = tmp_path / "run", tmp_path / "pids"
    with Gates(tmp_path / "gates", (2,)) as gates:
        command = unisono("run", SCRIPT, "-n", 1, "--run-dir", run_dir, "--", "--gates", gates.folder)
        gates.wait(2)
        url = json.loads((run_dir / "head.json").read_text())["url"]
        hangs = f"echo $$ > {shlex.quote(str(pids))}; sleep 1000002 & trap '' TERM; wait"
        guest = unisono("join", url, "--token-file", run_dir / "token", "-n", 1, "--while", hangs)
        command.line("joins, and offers workers only at certain times (--while)")
        deadline = time.monotonic() + WAIT_S
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert time.monotonic() < deadline
        os.kill(guest.pid, signal.SIGKILL)
        wait_until_gone({int(pids.read_text())}, deadline)
        gates.open(2)
        assert command.wait() == 0, command.err
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}


def test_an_empty_command_is_refused(unisono: Unisono) -> None:
    command = unisono("join", "wss://t@h:1", "--while", " ")
    assert command.wait() == 2
    assert "--while is a command" in command.err[0]
