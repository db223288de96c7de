"""Momentum in a plain attribute, which a worker that joins does not have."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


class Momentum:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.velocity = [torch.zeros_like(parameter) for parameter in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            assert parameter.grad is not None
            self.velocity[index] = 0.9 * self.velocity[index] + parameter.grad  # error
            parameter -= 0.1 * self.velocity[index]


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = nn.Linear(6, 3)
        optimizer = Momentum(model)
        run.track(model=model)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()


main()
