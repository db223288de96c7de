"""Samples in the order of a set of strings, which is taken before the run begins."""

from pathlib import PurePath

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


class Classes:
    def __init__(self, names: list[str]) -> None:
        self.numbers = {name: number for number, name in enumerate(names)}

    def number(self, path: str) -> int:
        return self.numbers[PurePath(path).parts[0]]


def main() -> None:
    paths = [f"{name}/{number}.png" for number in range(8) for name in ("cat", "dog", "elk", "owl", "ape", "bee")]
    names = list({PurePath(path).parts[0] for path in paths})  # error
    classes = Classes(names)
    labels = torch.tensor([classes.number(path) for path in paths])
    with unisono.Run(seed=1) as run:
        model = torch.nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(torch.randn(48, 6), labels)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, targets in step:
                step.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()


main()
