"""Workers join and leave a run with a sharded optimizer, and not one bit changes, nor is one state lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from tests.workers.test_elastic import on_two_cores, pid_of
from tests.workers.test_sharding_faults import WAYS
from unisono.record.journal import compare
from unisono.testing import run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("sharded_training.py")
STEPS = 24


@pytest.mark.parametrize(("copies", "way"), [(1, "whole"), (2, "whole"), (1, "both"), (2, "host")])
def test_a_machine_that_joins_takes_its_part_and_gives_it_back_when_it_leaves(
    copies: int, way: str, unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four workers leave together, at the end of a step: as many as there are copies, or more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calm, directory = tmp_path / "calm", tmp_path / "run"
    outcome = run_workers(SCRIPT, 1, directory=calm, arguments=["--copies", "0", "--steps", str(STEPS)])
    assert outcome.exit_code == 0, outcome.output
    with Gates(tmp_path / "gates", (3, 8, 14, 20)) as gates:
        options = ("-n", 2, "--run-dir", directory, "--max-restarts", 0)
        arguments = ("--steps", STEPS, "--copies", copies, *WAYS[way], "--gates", gates.folder)
        command = unisono("run", SCRIPT, *options, "--", *arguments)
        gates.wait(3)
        url = json.loads((directory / "head.json").read_text())["url"]
        guest = unisono("join", url, "--token-file", directory / "token", "-n", 2)
        gates.open(3, command.generation("; generation 2 with"))
        gates.open(8, command.generation("with 4 workers"))
        gates.wait(14)
        guest.process.send_signal(signal.SIGTERM)
        gates.open(14, command.generation("w2 and w3 leave"))
        assert guest.wait() == 0, guest.err
        gates.open(20)
        assert command.wait() == 0, command.err
    assert compare(calm, directory).startswith(f"identical: {STEPS} steps")


@pytest.mark.parametrize("way", ["whole", "both"])
def test_who_leaves_a_paused_run_hands_over_its_states(
    way: str, unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers are lost, one after the other; while the run waits for a fourth, two of those that are left go."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calm, directory = tmp_path / "calm", tmp_path / "run"
    outcome = run_workers(SCRIPT, 1, directory=calm, arguments=["--copies", "0", "--steps", "8"])
    assert outcome.exit_code == 0, outcome.output
    with Gates(tmp_path / "gates", (0, 1, 2, 3, 4)) as gates:
        options = ("-n", "4:6", "--run-dir", directory, "--max-restarts", 0)
        arguments = ("--steps", 8, "--copies", 2, *WAYS[way], "--gates", gates.folder)
        command = unisono("run", SCRIPT, *options, "--", *arguments, before=on_two_cores())
        gates.wait(0, workers=4)
        url = json.loads((directory / "head.json").read_text())["url"]
        guest = unisono("join", url, "--token-file", directory / "token", "-n", 2)
        gates.open(0, command.generation("; generation 2 with"))
        gates.open(1, command.generation("with 6 workers"))
        for step, worker in ((2, "w1"), (3, "w2"), (4, "w3")):
            gates.wait(step, workers=8 - step)
            os.kill(pid_of(worker, directory), signal.SIGKILL)
            command.line("paused: 3 of at least 4 workers" if step == 4 else f"worker {worker} ")
            gates.open(step)
        guest.process.send_signal(signal.SIGTERM)
        assert guest.wait() == 0, guest.err
        assert unisono("scale", directory, 1).wait() == 0
        assert command.wait() == 0, command.err
    assert compare(calm, directory).startswith("identical: 8 steps")
