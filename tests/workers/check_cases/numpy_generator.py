"""A numpy generator of the script's own, in the inner loop."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

run = unisono.Run(seed=1)
rng = np.random.default_rng(3)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)


def scale() -> float:
    return float(rng.uniform(0.9, 1.1))  # error


for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
    for inputs, labels in step:
        loss = F.cross_entropy(model(inputs * scale()), labels)
        loss.backward()
    optimizer.step()
