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
from unisono.journal import compare, read
from unisono.machine.idleness import last_input, others_seconds, own_seconds

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
    sizes = [len(line["workers"]) for line in read(run_dir) if line["kind"] == "step"]
    assert sizes[:4] == [1, 1, 1, 1]
    assert sizes[19] == 2
    assert sizes[21] == 1
    assert sizes[-1] == 2
