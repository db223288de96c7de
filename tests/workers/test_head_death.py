"""The head dies: members train on, another head takes them back, and nothing restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workers.conftest import wait_until_gone
from unisono.cli.reach import ask_status, find
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
def test_another_head_takes_over_and_no_worker_restarts(
    tmp_path: Path, also_a_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.cli.reach.TIMEOUT_S", 60.0)  # whoever calls only waits
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
            address = find(str(directory))
            before = ask_status(address)
            old = json.loads((directory / "head.json").read_text())["pid"]
            os.kill(old, signal.SIGKILL)
            if also_a_worker:
                os.kill(before["workers"][-1]["pid"], signal.SIGKILL)
            wait_until_gone({old}, time.monotonic() + 20)
            after = ask_status(address)
            (gate / "go").write_text("go")
            output, _ = process.communicate(timeout=90)
        except BaseException:
            process.terminate()
            raise

    assert process.returncode == 0, output
    assert "another one takes over" in output
    assert after["started"] == before["started"]
    assert after["reason"] == before["reason"] or also_a_worker
    assert before["reason"] == "all are ready; generation 1 with 3 workers"
    assert compare(tmp_path / "one", directory).startswith("identical: 12 steps")
    generations = {line["generation"] for line in read(directory / JOURNAL) if line["kind"] == "step"}
    assert (generations == {1}) is not also_a_worker, output
