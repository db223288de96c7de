"""A script with more than one `run.steps`: who joins later skips what is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.journal import compare, read
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.usefixtures("nursery")

# What is tracked in the second phase is made between the two, and an evaluation stands there as well.
SCRIPT = """
import pathlib, sys, torch, unisono
from torch.nn import functional as F
from torch.utils.data import TensorDataset
sys.path.insert(0, HERE)
from tests.workers.gates import wait_at

with unisono.Run(seed=3) as run:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(54, 12, generator=generator), torch.randint(0, 4, (54,), generator=generator))
    model = torch.nn.Sequential(torch.nn.Linear(12, 33), torch.nn.Dropout(0.2), torch.nn.Linear(33, 4))

    def evaluate():
        run.evaluate(data, lambda b: {"loss": F.cross_entropy(model(b[0]), b[1], reduction="sum")}, batch_size=7)

    def train(optimizer, steps):
        for step in run.steps(data, batch_size=24, microbatches=8, epochs=1000, max_steps=steps):
            if steps == 20 and len(sys.argv) > 1:
                wait_at(pathlib.Path(sys.argv[1]) / str(step.number))
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    first = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, first=first)
    train(first, 5)
    evaluate()
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(second=second)
    train(second, 20)
    evaluate()
"""


def test_a_newcomer_joins_in_the_second_phase(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calm, hurt = tmp_path / "train.py", tmp_path / "calm", tmp_path / "hurt"
    script.write_text(f"HERE = {str(Path(__file__).parents[2])!r}\n{SCRIPT}")
    outcome = run_workers(script, 1, directory=calm)
    assert outcome.exit_code == 0, outcome.output
    faults = Faults().kill("w1", at="before_combine", step=9)  # which all pass, also who computes nothing
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (12,)) as gates:
        command = unisono("run", script, "-n", 3, "--run-dir", hurt, "--", gates.folder)
        gates.wait(12)
        command.line("w3 joins")
        gates.open(12)
        assert command.wait() == 0, command.err
    assert compare(calm, hurt).startswith("identical: 25 steps")
    sizes = [len(line["workers"]) for line in read(hurt) if line["kind"] == "step"]
    assert sizes[-1] == 3  # the replacement was admitted, and has skipped the first phase
