"""A running mean in a plain attribute of a model, where a buffer belongs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.mean = torch.zeros(6)

    def forward(self, inputs: Tensor) -> Tensor:
        centred = inputs - self.mean
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)  # error
        return self.linear(centred)


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6) + 2, torch.randint(0, 3, (64,)))
        model = Centred()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()


main()
