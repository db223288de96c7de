"""A cache whose keys are addresses, which other objects get later."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

_scales: dict[int, Tensor] = {}


def scale_of(inputs: Tensor) -> Tensor:
    if id(inputs) not in _scales:
        _scales[id(inputs)] = inputs.std()  # error
    return _scales[id(inputs)]


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs / scale_of(inputs)), labels))
            optimizer.step()


main()
