"""How many bytes of the device a step needs, in sizes of the model."""

from __future__ import annotations

import gc
import importlib
import json
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.emulated.apart import use_the_device
from tests.workers.processes import Seat, Team
from tests.workers.static_team import Place, train_on
from unisono.script.run import Run

WIDTH, LAYERS, STEPS = 256, 8, 11
FIRST = 9
"""Up to the eighth step, states are compared and micro-batches rehearsed."""


def peak(run: Run, microbatches: int) -> float:
    """Return the most that a step has held, divided by the bytes of the parameters. An optimizer has no states here."""
    device = importlib.import_module("tests.emulated.accelerator")
    gc.collect()
    most, before = 0, device.held.now  # of the trainings before
    with run:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        samples = TensorDataset(torch.randn(STEPS * microbatches, WIDTH))
        for step in run.steps(samples, batch_size=microbatches, microbatches=microbatches, max_steps=STEPS):
            device.held.peak = device.held.now
            for (inputs,) in step:
                step.backward(model(inputs.to(run.device)).square().mean())
            optimizer.step()
            if FIRST <= step.number < STEPS - 1:  # in the last one, states are compared as well
                most = max(most, device.held.peak)
    return (most - before) / (4 * WIDTH * WIDTH * LAYERS)


def count_bytes() -> None:
    device: Any = importlib.import_module("tests.emulated.accelerator")
    device.held = device.Held()


def _alone(seat: Seat) -> dict[int, float]:
    torch.set_num_threads(1)
    use_the_device()
    count_bytes()
    return {microbatches: peak(Run(None, seed=3), microbatches) for microbatches in (1, 2, 7, 8)}


def _together(seat: Seat, place: Place) -> float:
    """Without balance: each member has four micro-batches, on whatever machine."""
    place.device = use_the_device()
    count_bytes()
    return peak(place.run(None, seed=3, balance=False), 8)


def main() -> None:
    with Team(1, _alone) as team:
        (alone,) = team.results()
    print(json.dumps({"alone": alone, "together": train_on("gloo", 2, _together)}))


if __name__ == "__main__":
    main()
