"""An evaluation whose function counts its batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

run = unisono.Run(seed=0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model = nn.Linear(6, 3)
opt = torch.optim.Adam(model.parameters())
run.track(model=model, opt=opt)
seen = 0


def score(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    global seen
    x, y = batch
    seen += 1  # error
    return {"loss": F.cross_entropy(model(x), y, reduction="sum") * (1 + seen)}


for step in run.steps(data, batch_size=16, microbatches=4):
    for x, y in step:
        F.cross_entropy(model(x), y).backward()
    opt.step()
    run.evaluate(data, score, batch_size=16)
