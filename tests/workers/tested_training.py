"""A training of a moment with a test loop after each epoch: ``unisono run tested_training.py -- --epochs 3``.

With ``--gates DIR``, workers stop at the head of step N of the run while a test holds gate N.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import SupportsInt

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.gates import wait_at


def check_rows(run: unisono.Run, data: TensorDataset, right: SupportsInt) -> int:
    """Check that the rows are those of all samples, in their order; returns how many scores are above 0."""
    labels, found = run.collected("labels"), run.collected("found")
    assert torch.equal(labels, data.tensors[1])
    assert (labels.numpy() == found).sum() == int(right)
    return sum(map(len, run.collected("near")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    best = unisono.Checkpoints(every_steps=1000, keep=1, keep_best="val/loss")
    run = unisono.Run(seed=3, checkpoint=best, resume="auto")
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(54, 12, generator=draw), torch.randint(0, 4, (54,), generator=draw))
    model = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    train_loader, test_loader = DataLoader(data, batch_size=24, shuffle=True), DataLoader(data, batch_size=7)
    for epoch in range(arguments.epochs):
        for step in run.steps(train_loader, microbatches=8):
            wait_at(arguments.gates / str(step.number))
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss, right = run.total("loss"), run.total("right")
        for x, y in run.batches(test_loader):
            scores = model(x)
            run.collect(labels=y, found=scores.argmax(1).numpy(), near=[row[row > 0].tolist() for row in scores])
            loss += F.cross_entropy(scores, y, reduction="sum").item()
            right += (scores.argmax(1) == y).sum()
        loss /= len(data)
        sure = run.once(partial(check_rows, run, data, right))
        print(f"epoch {epoch}: loss {loss:.9f}, {right} right, {sure} scores")
        scheduler.step()  # before the call that saves: a script that resumes from there has done so
        run.log({"val/loss": loss})


if __name__ == "__main__":
    main()
