"""The head dies: members train on, another head takes them back, and nothing restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.journal import JOURNAL, compare, read
from unisono.testing import run_workers

pytestmark = pytest.mark.timeout(120)

# A script that stands still at a step until the test has done what it wants to do there.
SCRIPT = """
import pathlib, sys, torch, unisono
from torch.nn import functional as F
from torch.utils.data import TensorDataset

gate = pathlib.Path(sys.argv[1])
with unisono.Run(seed=3) as run:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=4, epochs=6):
        if step.number == 5 and run.is_main:
            (gate / "reached").open("w").write("x")  # a pipe: the test reads it, and then answers
            (gate / "go").open().read()
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
"""


@pytest.mark.parametrize("also_a_worker", [False, True], ids=["head", "head-and-worker"])
def test_another_head_takes_over_and_no_worker_restarts(tmp_path: Path, also_a_worker: bool) -> None:
    script, gate = tmp_path / "train.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    gate.mkdir()
    for name in ("reached", "go"):
        os.mkfifo(gate / name)
    calm_gate = tmp_path / "calm"
    calm_gate.mkdir()
    (calm_gate / "go").write_text("")
    calm = run_workers(script, 1, directory=tmp_path / "one", arguments=[str(calm_gate)])
    assert calm.exit_code == 0, calm.output

    directory = tmp_path / "three"
    command = [sys.executable, "-m", "unisono", "run", "-n", "3", "--run-dir", directory, script, "--", str(gate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            (gate / "reached").read_text()
            before = _status(directory)
            old = json.loads((directory / "head.json").read_text())["pid"]
            os.kill(old, signal.SIGKILL)
            if also_a_worker:
                os.kill(before[-1]["pid"], signal.SIGKILL)
            (gate / "go").write_text("go")
            output, _ = process.communicate(timeout=90)
        except BaseException:
            process.terminate()
            raise

    assert process.returncode == 0, output
    assert "another one takes over" in output
    assert compare(tmp_path / "one", directory).startswith("identical: 12 steps")
    generations = {line["generation"] for line in read(directory / JOURNAL) if line["kind"] == "step"}
    assert (generations == {1}) is not also_a_worker, output


def _status(directory: Path) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "unisono", "status", str(directory), "--json"]
    workers: list[dict[str, int]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[
        "workers"
    ]
    return sorted(workers, key=lambda worker: worker["rank"])
