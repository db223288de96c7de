"""A hook with a state."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

calls = [0]


def hook(module: nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    calls[0] += 1  # error
    return output * (1 + 0.01 * calls[0])


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        model.register_forward_hook(hook)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                scale = 1.0
                step.backward(F.cross_entropy(model(inputs), labels) * scale)
            optimizer.step()


main()
