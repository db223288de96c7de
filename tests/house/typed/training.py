"""A training as a user writes it, with annotations."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono


def count(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    inputs, labels = batch
    return {"right": (model(inputs).argmax(1) == labels).sum()}


def main(directory: Path) -> float:
    policy = unisono.Checkpoints(every_steps=10, keep=2)
    with unisono.Run(directory, seed=7, checkpoint=policy, resume="auto") as run:
        device: torch.device = run.device
        data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
        model = nn.Linear(8, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        loss = 0.0
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=2):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
                step.add(seen=len(labels))
            optimizer.step()
            step.log(rate=0.1)
            number: int = step.number
            loss = step.loss
            if number % 10 == 9:
                totals = run.evaluate(data, lambda batch: count(model, batch), batch_size=16)
                print(int(totals["right"]), run.rank, run.num_workers, step.totals)
        right, seen = run.total("right"), run.total("seen")
        batches = run.batches(DataLoader(data, 16))
        for inputs, labels in batches:
            right += (model(inputs).argmax(1) == labels).sum()
            seen += len(labels)
            batches.add(samples=len(labels))
        accuracy: float = right / seen
        run.log({"val/accuracy": accuracy}, samples=batches.totals["samples"])
        for _ in run.steps(DataLoader(data, 16), microbatches=4, delay=1):
            pass
        run.save()
    return loss


def resumed(directory: Path) -> nn.Module:
    model = nn.Linear(8, 4)
    try:
        unisono.load_weights(directory, model)
    except unisono.CheckpointError as error:
        print(error)
    return model


def launched() -> float:
    result: float = unisono.launch(main, Path("runs/one"), workers=2)
    return result
