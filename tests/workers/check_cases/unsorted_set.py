"""Layers in the order of a set of strings."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = {"colour", "shape", "size", "weight", "age", "price"}
        self.heads = nn.ModuleDict()
        for name in names:  # error
            self.heads[name] = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([head(inputs) for head in self.heads.values()]).sum(0)


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()


main()
