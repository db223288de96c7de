"""A loss that depends on the time."""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        begun = time.perf_counter()
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                weight = 1 + time.perf_counter() % 1.0  # error
                step.backward(F.cross_entropy(model(inputs), labels) * weight)
            optimizer.step()
            print(f"{time.perf_counter() - begun:.1f} s")


main()
