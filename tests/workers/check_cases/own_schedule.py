"""A learning rate that counts its own steps."""

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
        done = 0
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                scale = 1.0
                step.backward(F.cross_entropy(model(inputs), labels) * scale)
            done = done + 1  # error
            optimizer.param_groups[0]["lr"] = 0.1 / done
            optimizer.step()


main()
