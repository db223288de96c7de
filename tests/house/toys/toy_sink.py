"""A sink that the library does not know, in a training: ``unisono run toy_sink.py -- FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.core.events import Event, MembershipChanged, RunEnded, RunStarted, StepFinished

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


if __name__ == "__main__":
    train(Path(sys.argv[1]) if sys.argv[1:] else None)
