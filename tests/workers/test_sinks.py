"""Sinks of the command line: found before anything is started, and given every step once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono
from unisono.core.errors import UsageError
from unisono.testing import Faults, run_workers
from unisono.views.watch import named

SCRIPT = """
import torch, unisono
from torch.utils.data import TensorDataset

with unisono.Run(seed=1) as run:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(TensorDataset(torch.ones(64, 4)), batch_size=8, microbatches=2):
        for (inputs,) in step:
            step.backward(model(inputs).square().mean())
        optimizer.step()
"""
SINKS = """
from unisono.core.events import StepFinished

class Lines:
    def __init__(self, path):
        self.path = path

    def emit(self, event):
        if isinstance(event, StepFinished):
            with open(self.path, "a") as file:
                print(event.step, file=file)

    def close(self):
        pass
"""


@pytest.mark.usefixtures("nursery")
def test_a_sink_of_your_own_gets_every_step_once_although_the_writer_is_killed(
    script: Callable[..., str], tmp_path: Path
) -> None:
    script(SINKS, "lines.py")
    outcome = run_workers(
        tmp_path / script(SCRIPT), 2, directory=tmp_path / "run", options=["--sink", f"lines:Lines={tmp_path}/told"],
        faults=Faults().kill("w0", at="after_step", step=3), timeout_s=WAIT_S,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "told").read_text().split() == [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sink", "tensorbord"], "there is no sink 'tensorbord'; known are logging, mlflow, opentelemetry, "),
        (["--profile", "5"], "--profile takes A:B, e.g. 100:105 for the steps 100 to 104; got --profile 5"),
        (["--profile", "7:7"], "--profile takes A:B"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_started(
    options: list[str], words: str, unisono: Unisono, script: Callable[..., str]
) -> None:
    command = unisono("run", *options, script(SCRIPT))
    assert command.wait() == 2
    assert words in " ".join(command.err)


@pytest.mark.parametrize(
    ("sink", "module", "extra"),
    [
        ("tensorboard", "tensorboard", "tensorboard"),
        ("mlflow", "mlflow", "mlflow"),
        ("wandb", "wandb", "wandb"),
        ("opentelemetry", "opentelemetry", "opentelemetry"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    sink: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs the package {module}: pip install '{extra}[\w-]*>="):
        named(sink, is_here=False)
