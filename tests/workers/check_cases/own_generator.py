"""A generator of the script's own, in a model."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(inputs.shape, generator=self.generator)  # error
        return self.linear(inputs + 0.1 * noise)


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()


main()
