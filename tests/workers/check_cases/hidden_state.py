"""A hidden state that goes from micro-batch to micro-batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


def main() -> None:
    with unisono.Run(seed=1) as run:
        data = TensorDataset(torch.randn(64, 5, 6), torch.randint(0, 3, (64,)))
        model = nn.GRU(6, 3, batch_first=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        hidden = None
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                outputs, hidden = model(inputs, hidden)  # error
                hidden = hidden.detach()
                step.backward(F.cross_entropy(outputs[:, -1], labels))
            optimizer.step()


main()
