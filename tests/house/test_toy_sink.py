"""A sink in a few lines, against the public protocol alone, in a real training. This file is also the script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
from unisono.events import Event, MembershipChanged, RunEnded, RunStarted, StepFinished
from unisono.testing import Faults, Outcome, run_workers

STEPS = 6


class StepFile:
    """Appends one line for each step to a file that the sinks of all workers share."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def emit(self, event: Event) -> None:
        match event:
            case StepFinished():
                print("step", event.step, event.digest, file=self._file)
            case RunStarted() | MembershipChanged() | RunEnded():
                print(type(event).__name__, file=self._file)

    def close(self) -> None:
        self._file.close()


class Broken:
    """A sink that raises does no harm."""

    def emit(self, event: Event) -> None:
        raise RuntimeError("no room for events")

    def close(self) -> None:
        pass


def train(told: Path | None) -> None:
    with unisono.Run(seed=1, sinks=[Broken(), StepFile(told)] if told is not None else []) as run:
        data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
        model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=8, microbatches=4, epochs=9, max_steps=STEPS):
            for inputs, labels in step:
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run without sinks and without a loss."""
    return run_workers(__file__, 1, directory=tmp_path_factory.mktemp("calm") / "run")


@pytest.mark.parametrize("worker", ["w0", "w1"])
def test_a_sink_gets_every_step_once_and_in_order_whoever_is_killed(worker: str, calm: Outcome, tmp_path: Path) -> None:
    """Killed after the step and before its line: the other worker's sink gets what it has told nobody."""
    told, faults = tmp_path / "told", Faults().kill(worker, at="after_step", step=3)
    hurt = run_workers(__file__, 2, directory=tmp_path / "hurt", arguments=[str(told)], faults=faults)
    assert (calm.exit_code, hurt.exit_code) == (0, 0), hurt.output
    assert f"worker {worker}" in hurt.output
    assert (hurt.digests, hurt.final) == (calm.digests, calm.final)
    lines = [line.split() for line in told.read_text().splitlines()]
    assert [(int(rest[0]), rest[1]) for kind, *rest in lines if kind == "step"] == list(enumerate(calm.digests))
    assert (lines[0], lines[1], lines[-1]) == (["RunStarted"], ["MembershipChanged"], ["RunEnded"])
    assert hurt.output.count("the sink Broken gets no more events: its emit(RunStarted) raised RuntimeError") > 0


if __name__ == "__main__":
    train(Path(sys.argv[1]) if sys.argv[1:] else None)
