"""A training of a moment, for tests of what happens around it: ``unisono run small_training.py -- --steps 8``.

With ``--gates DIR``, every worker stops at the head of step N while a test holds gate N (`gates`). So a test lets
somebody join, leave or die at a known step, and never has to guess how long something takes.
"""

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
from tests.workers.gates import wait_at

NUM_SAMPLES = 54
BATCH_SIZE = 24
NEW_SUM = 3
"""The step from which on it adds something else, too."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--even", action="store_true", help="all workers compute as many micro-batches")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    with unisono.Run(seed=3, balance=not arguments.even) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(NUM_SAMPLES, 12, generator=draw), torch.randint(0, 4, (NUM_SAMPLES,), generator=draw)
        )
        model = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4)).to(
            run.device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            inputs, labels = batch
            scores = model(inputs)
            loss = F.cross_entropy(scores, labels, reduction="sum")
            return {"right": (scores.argmax(1) == labels).sum(), "loss": loss}

        for step in run.steps(
            data,
            batch_size=BATCH_SIZE,
            microbatches=arguments.microbatches,
            epochs=1000,
            max_steps=arguments.steps,
            wire=arguments.wire,
        ):
            wait_at(arguments.gates / str(step.number))
            if step.number in (1, 30):
                model[1].train(step.number == 30)
                model[3].p = 0.4
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
                step.add(seen=len(labels), **{"inputs": inputs.sum()} if step.number >= NEW_SUM else {})
            optimizer.step()
            if step.number % 3 == 2:
                run.evaluate(data, count, batch_size=7)
                assert run.broadcast(step.number) == step.number


if __name__ == "__main__":
    main()
