"""The script that `benchmarks.planning` plans and runs: ``planned.py CASE MICROBATCHES STRATEGY``."""

from __future__ import annotations

import argparse

import torch

import unisono
from benchmarks.models import CASES

__all__ = ["STRATEGIES"]

STRATEGIES = ("replicated", "shard", "bf16", "delay", "local")
NUM_BATCHES = 16
RATE = 1e-4
EPOCHS = 1 << 20
COPIES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("microbatches", type=int)
    parser.add_argument("--strategy", choices=STRATEGIES, default="replicated")
    parser.add_argument("--steps", type=int, help="default: until it is stopped")
    options = parser.parse_args()
    case = CASES[options.case]
    batch_size = case.microbatch_size * options.microbatches
    with unisono.Run(None, seed=1, checkpoint=None) as run:
        model = case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        if options.strategy == "shard":
            optimizer = unisono.shard(optimizer, copies=COPIES)
        run.track(model=model, optimizer=optimizer)
        data = case.data(batch_size * NUM_BATCHES)
        for step in run.steps(
            data,
            batch_size=batch_size,
            microbatches=options.microbatches,
            epochs=EPOCHS,
            max_steps=options.steps,
            wire="bf16" if options.strategy == "bf16" else "fp32",
            delay=int(options.strategy == "delay"),
        ):
            for inputs, labels in step:
                step.backward(case.loss(model, inputs, labels), weight=len(labels))
            optimizer.step()


if __name__ == "__main__":
    main()
