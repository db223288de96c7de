"""`small_training` with gradients that are under way: ``unisono run delayed_training.py -- --steps 8 --delay 2``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.disk import wait_for_disk
from tests.workers.gates import wait_at
from tests.workers.small_training import BATCH_SIZE, NUM_SAMPLES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--every", type=int, default=None)
    parser.add_argument("--evaluates", type=int, default=0)
    parser.add_argument("--leave-after", type=int, default=-1)
    parser.add_argument("--even", action="store_true", help="all workers compute as much")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    policy = unisono.Checkpoints(every_steps=arguments.every, keep=100) if arguments.every else None
    with unisono.Run(seed=3, checkpoint=policy, balance=not arguments.even) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(NUM_SAMPLES, 12, generator=draw), torch.randint(0, 4, (NUM_SAMPLES,), generator=draw)
        )
        model = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4)).to(
            run.device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            inputs, labels = batch
            scores = model(inputs)
            return {"right": (scores.argmax(1) == labels).sum(), "loss": F.cross_entropy(scores, labels)}

        options = {"batch_size": BATCH_SIZE, "microbatches": 8, "epochs": 1000, "max_steps": arguments.steps}
        for step in run.steps(data, **options, delay=arguments.delay, predict=arguments.predict):
            wait_at(arguments.gates / str(step.number))
            if arguments.every:
                wait_for_disk(run)
            for inputs, labels in step:
                loss = F.cross_entropy(model(inputs), labels)
                step.backward(loss * (1 + 0.1 * (step.number % 3)), weight=len(labels))
                step.add(seen=len(labels), inputs=inputs.sum())
            optimizer.step()
            scheduler.step()
            if arguments.evaluates and step.number % arguments.evaluates == arguments.evaluates - 1:
                run.evaluate(data, count, batch_size=7)
                assert run.broadcast(step.number) == step.number
            if step.number == arguments.leave_after:
                break
        run.evaluate(data, count, batch_size=7)


if __name__ == "__main__":
    main()
