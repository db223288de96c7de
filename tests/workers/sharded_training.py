"""A training of a moment with a sharded optimizer: ``unisono run sharded_training.py -- --copies 2``.

With ``--copies 0`` the optimizer is replicated.

It prints ``states: w1 holds 0 2 5`` at its end, the parameters whose states a worker holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.gates import wait_at

NUM_SAMPLES = 54
BATCH_SIZE = 24
THAW = 4
"""The step from which on the last layers are trained, too."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--parameters", default="worker")
    parser.add_argument("--gradients", default="worker")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--unbalanced", action="store_true", help="all workers compute as many micro-batches")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    every = arguments.checkpoint_every
    checkpoint = unisono.Checkpoints(every_steps=every) if every else None
    with unisono.Run(seed=3, checkpoint=checkpoint, balance=not arguments.unbalanced) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(NUM_SAMPLES, 12, generator=draw), torch.randint(0, 4, (NUM_SAMPLES,), generator=draw)
        )
        model = nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4)
        ).to(run.device)
        optimizer = OPTIMIZERS[arguments.optimizer](model.parameters(), lr=0.01)
        if arguments.copies:
            optimizer = unisono.shard(
                optimizer, copies=arguments.copies, parameters=arguments.parameters, gradients=arguments.gradients
            )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        model[5].requires_grad_(False)
        for step in run.steps(data, batch_size=BATCH_SIZE, microbatches=8, epochs=1000, max_steps=arguments.steps):
            wait_at(arguments.gates / str(step.number))
            if step.number == THAW:
                model[5].requires_grad_(True)
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
            if arguments.clip:
                unisono.clip_grad_norm_(model.parameters(), arguments.clip)
            optimizer.step()
            scheduler.step()
        states = optimizer.state_dict()["state"]
        held = [index for index, state in states.items() if not any(value.is_meta for value in state.values())]
        print("states:", f"w{run.rank}", "holds", *held, flush=True)


if __name__ == "__main__":
    main()
