"""Keeps the promise, with much that looks as if it did not: clocks, counters and ranks that reach no gradient."""

import random
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unisono


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(64, 6)
        self.labels = torch.randint(0, 3, (64,))
        self.reads = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return self.inputs[index] + 0.1 * torch.randn(6) + random.random() * np.random.rand(), self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers(inputs)
        return out


def main() -> None:
    with unisono.Run(seed=1) as run:
        data, model = Noisy(), Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        begun, losses, seen = time.perf_counter(), [], 0
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, labels in step:
                seen += len(labels)
                loss = F.cross_entropy(model(inputs), labels)
                losses.append(loss.item())
                step.add(right=(loss.detach() < 1).sum())
                step.backward(loss)
            optimizer.step()
            scheduler.step()
            if run.is_main:
                print(f"{seen} samples in {time.perf_counter() - begun:.1f} s, {np.mean(losses):.3f}, {step.totals}")


main()
