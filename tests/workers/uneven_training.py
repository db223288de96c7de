"""A training some of whose ranks take longer for each micro-batch: ``unisono run uneven_training.py -- --extra-s 0.1``.

They sleep: so how long they take does not depend on who runs beside them. ``--walls DIR`` lets each worker write there
how long its steps took, by its own clock: from the end of one turn of the loop to that of the next.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

NUM_LEAVES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--each-s", type=float, default=0.0, help="how long every rank takes for a micro-batch")
    parser.add_argument("--slow", type=int, default=1, help="the rank that takes longer")
    parser.add_argument("--extra-s", type=float, default=0.0, help="... by so much")
    parser.add_argument("--from-step", type=int, default=0, help="... from this step on")
    parser.add_argument("--until-step", type=int, default=1 << 30, help="... and before this one")
    parser.add_argument("--walls", type=Path)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--unbalanced", action="store_true")
    arguments = parser.parse_args()
    wall: list[float] = []
    with unisono.Run(seed=5, balance=not arguments.unbalanced) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(160, 32, generator=draw), torch.randint(0, 4, (160,), generator=draw))
        model = nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            return {"right": (model(batch[0]).argmax(1) == batch[1]).sum()}

        since = time.perf_counter()
        for step in run.steps(data, batch_size=32, microbatches=NUM_LEAVES, epochs=1000, max_steps=arguments.steps):
            is_slow = run.rank == arguments.slow and arguments.from_step <= step.number < arguments.until_step
            for inputs, labels in step:
                time.sleep(arguments.each_s + (arguments.extra_s if is_slow else 0.0))
                step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
            optimizer.step()
            if arguments.evaluate and step.number % 4 == 3:
                run.evaluate(data, count, batch_size=16)
            now = time.perf_counter()
            wall.append(now - since)
            since = now
        if arguments.walls is not None:
            (arguments.walls / f"w{run.rank}").write_text(json.dumps(wall))


if __name__ == "__main__":
    main()
