"""A dataset whose samples change with every read."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unisono


class Fading(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(64, 6)
        self.labels = torch.randint(0, 3, (64,))
        self.reads = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1  # error
        return self.inputs[index] * 0.99**self.reads, self.labels[index]


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = Fading()
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()


main()
