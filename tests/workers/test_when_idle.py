"""A desktop takes part in a run while nobody uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.journal import compare
from unisono.journal.times import by_step
from unisono.machine.idleness import last_input, others_seconds, own_seconds, session_input

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")
STEPS = 60
BURN = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"


def test_the_time_of_own_processes_counts_once_also_when_they_have_ended() -> None:
    before = own_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        running = own_seconds()
        child.communicate("\n")
    after = own_seconds()
    assert running - before >= 0.45
    assert running <= after < running + 5.0
    assert others_seconds() > 0


def test_of_a_file_the_last_write_counts_and_of_a_terminal_the_last_read(tmp_path: Path) -> None:
    assert last_input([str(tmp_path / "no*")]) == -float("inf")
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (5000, 1000 + number))
    assert last_input([str(tmp_path / "[ab]")]) == 1001
    ours, theirs = os.openpty()
    try:
        os.utime(os.ttyname(theirs), (3000, 9000))
        assert last_input([os.ttyname(theirs), str(tmp_path / "[ab]")]) == 3000
    finally:
        os.close(ours)
        os.close(theirs)


LOGINCTL = """#!/bin/sh
if [ "$1" = list-sessions ]; then
    cat sessions
else
    cat "session-$2"
fi
"""


def test_a_graphical_session_is_used_until_its_desktop_says_that_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What logind says: a greeter does not count, nor a session in a terminal, which is seen by its device."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loginctl").write_text(LOGINCTL)
    (tmp_path / "loginctl").chmod(0o755)
    (tmp_path / "sessions").write_text(" c1 120 gdm seat0\n  3 1000 ada seat0 tty2\n  5 1000 ada - pts/1\n")

    def says(session: str, kind: str, hint: str, since: str, owner: str = "user") -> None:
        text = f"Type={kind}\nClass={owner}\nIdleHint={hint}\nIdleSinceHint={since}\n"
        (tmp_path / f"session-{session}").write_text(text)

    says("c1", "wayland", "no", "0", "greeter")
    says("5", "tty", "no", "0")
    says("3", "wayland", "no", "0")
    assert session_input(500.0) == 500.0
    says("3", "wayland", "yes", "300000000")
    assert session_input(500.0) == 300.0
    (tmp_path / "sessions").write_text("")
    assert session_input(500.0) == -float("inf")
    (tmp_path / "loginctl").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert session_input(500.0) == -float("inf")


@pytest.mark.usefixtures("nursery")
def test_a_machine_joins_when_nobody_uses_it_and_leaves_within_a_step(unisono: Unisono, tmp_path: Path) -> None:
    calm = unisono("run", SCRIPT, "-n", 1, "--run-dir", tmp_path / "calm", "--", "--steps", STEPS)
    assert calm.wait() == 0, calm.err
    run_dir, seen = tmp_path / "run", tmp_path / "input"
    with Gates(tmp_path / "gates", (3, 20, 40)) as gates:
        place = ("--", "--steps", STEPS, "--gates", gates.folder)
        command = unisono("run", SCRIPT, "-n", 1, "--run-dir", run_dir, *place)
        gates.wait(3)
        seen.touch()
        url = json.loads((run_dir / "head.json").read_text())["url"]
        idle = ("--when-idle", "--idle-s", 0.5, "--idle-load", 1e6, "--input", seen)
        guest = unisono("join", url, "--token-file", run_dir / "token", "-n", 1, *idle)
        command.line("joins, and offers workers while nobody uses it")
        command.line("offers 1 worker: ")
        gates.open(3, command.generation("w1 joins"))
        gates.wait(20, workers=2)
        seen.touch()
        gates.open(20, command.generation("somebody uses it; w1 leaves"))
        gates.wait(40)
        gates.open(40, command.generation("w2 joins"))
        assert command.wait() == 0, command.err
        assert guest.wait() == 0, guest.err
    assert compare(tmp_path / "calm", run_dir).startswith(f"identical: {STEPS} steps")
    sizes = [len(workers) for workers in by_step(run_dir).values()]
    assert sizes[:4] == [1, 1, 1, 1]
    assert sizes[19] == 2
    assert sizes[21] == 1
    assert sizes[-1] == 2
