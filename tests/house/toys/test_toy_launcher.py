"""A launcher written against the public protocol alone: two agents on this host, as if they were two machines.

Run as a program, this file is the command that starts the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from unisono.cluster import launchers
from unisono.cluster.launchers import AgentCommand, AgentProcess, Handle, Launcher, Machine, Policy, RunSpec, Service
from unisono.core.settings import RunSettings
from unisono.record.journal import compare
from unisono.record.journal.times import by_step
from unisono.system.lifetime import PARENT
from unisono.testing import run_workers

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[3]
TRAINING = ROOT / "tests" / "workers" / "small_training.py"
STEPS = "4"


class TwoMachines(Launcher):
    """Each agent is a process of its own."""

    def machines(self) -> list[Machine]:
        return [Machine(name="left", num_workers=1), Machine(name="right", num_workers=2)]

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        return AgentProcess(command)


@pytest.mark.usefixtures("nursery")
def test_a_launcher_of_two_machines_trains_the_same_bits(tmp_path: Path) -> None:
    calm = run_workers(TRAINING, 1, directory=tmp_path / "calm", arguments=["--steps", STEPS], timeout_s=WAIT_S)
    assert calm.exit_code == 0, calm.output
    command: list[str | Path] = [sys.executable, "-P", __file__, tmp_path / "run", STEPS]
    environment = {**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert compare(tmp_path / "calm", tmp_path / "run").startswith("identical: 4 steps")
    assert [len(workers) for workers in by_step(tmp_path / "run").values()][-1] == 3


if __name__ == "__main__":
    settings = RunSettings(run_dir=sys.argv[1], exchange="gloo")
    spec = RunSpec(arguments=(str(TRAINING), "--steps", sys.argv[2]), settings=settings)
    together = Service(policy=Policy(start=3, minimum=3, maximum=3))
    sys.exit(launchers.run(spec, TwoMachines(), together))
