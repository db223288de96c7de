"""A training whose every number is exact, so that its bits are the same on any processor and with any version of torch.

The gradient of the loss is the mean of whole numbers, and all that is multiplied with is a power of two::

    unisono run exact_training.py --workers 2 --run-dir RUN -- --steps 12

The runs beside it were written by earlier versions of the library with this script; today's must understand them.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

NUM_SAMPLES, BATCH_SIZE, MICROBATCHES = 64, 16, 4


class Sum(nn.Module):
    """A weighted sum of the inputs, and a count of the micro-batches that it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8, dtype=torch.float64) / 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return (inputs * self.weight).sum(1)


def train(run: unisono.Run, steps: int) -> Sum:
    inputs = (torch.arange(NUM_SAMPLES * 8, dtype=torch.float64) * 37 % 64).view(NUM_SAMPLES, 8)
    data = TensorDataset(inputs)
    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    run.track(model=model, optimizer=optimizer)

    def count(batch: list[Tensor]) -> dict[str, Tensor]:
        return {"positive": (model(batch[0]) > 0).sum()}

    for step in run.steps(data, batch_size=BATCH_SIZE, microbatches=MICROBATCHES, epochs=100, max_steps=steps):
        for (samples,) in step:
            step.backward(model(samples).mean(), weight=len(samples))
            step.add(samples=len(samples))
        optimizer.step()
        if step.number % 4 == 3:
            step.log(positive=run.evaluate(data, count, batch_size=16)["positive"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with unisono.Run(seed=5, checkpoint=unisono.Checkpoints(every_steps=5, keep=2)) as run:
        train(run, arguments.steps)


if __name__ == "__main__":
    main()
