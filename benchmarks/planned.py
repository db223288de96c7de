"""The script that `benchmarks.planning` plans and runs: ``planned.py CASE MICROBATCHES --strategy STRATEGY``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import unisono
from benchmarks.models import CASES
from unisono.record.problems.limits import own_memory, own_peak, own_share, reset_peak

__all__ = ["COPIES", "INNER_STEPS", "SPENT", "STRATEGIES"]

STRATEGIES = ("replicated", "shard", "bf16", "delay", "local")
NUM_BATCHES = 16
RATE = 1e-4
EPOCHS = 1 << 20
COPIES = 2
INNER_STEPS = 4
WARM_UP = 2
"""Steps whose memory does not count."""
SPENT = "bytes, and seconds of a processor for a step: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("microbatches", type=int)
    parser.add_argument("--strategy", choices=STRATEGIES, default="replicated")
    parser.add_argument("--replicas", type=int, default=1, help="of --strategy local")
    parser.add_argument("--steps", type=int, help="of --strategy local, rounds; default: until it is stopped")
    options = parser.parse_args()
    case = CASES[options.case]
    batch_size = case.microbatch_size * options.microbatches
    with unisono.Run(None, seed=1, checkpoint=None) as run:
        model = case.model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        if options.strategy == "shard":
            optimizer = unisono.shard(optimizer, copies=COPIES)
        run.track(model=model, optimizer=optimizer)
        data = case.data(batch_size * NUM_BATCHES)
        batches: dict[str, Any] = {"batch_size": batch_size, "microbatches": options.microbatches, "epochs": EPOCHS}

        def train(step: Any) -> None:
            for inputs, labels in step:
                step.backward(case.loss(model, inputs, labels), weight=len(labels))
            optimizer.step()

        if options.strategy == "local":
            _train_local(run, data, batches, options, train)
            return
        spent = _Spent(options.steps)
        wire: Any = "bf16" if options.strategy == "bf16" else "fp32"
        delay = int(options.strategy == "delay")
        for step in run.steps(data, **batches, max_steps=options.steps, wire=wire, delay=delay):
            train(step)
            spent.note(step.number)


def _train_local(
    run: unisono.Run, data: Any, batches: dict[str, Any], options: argparse.Namespace, train: Callable[[Any], None]
) -> None:
    most = None if options.steps is None else options.steps * INNER_STEPS
    spent = _Spent(options.steps)
    for turn in run.local_steps(data, **batches, replicas=options.replicas, inner_steps=INNER_STEPS, max_steps=most):
        for step in turn:
            train(step)
        spent.note(turn.number)


class _Spent:
    """Prints what this process has needed between two steps, at the second, while all other workers are there.

    Args:
        steps: of the training; None: nothing is printed.
    """

    def __init__(self, steps: int | None) -> None:
        self._last = None if steps is None else steps - WARM_UP
        self._began = 0.0

    def note(self, number: int) -> None:
        """Note that a step is done."""
        if number == WARM_UP:
            reset_peak()
            self._began = time.process_time()
        if number == self._last:
            seconds = (time.process_time() - self._began) / (number - WARM_UP)
            print(f"{SPENT}{own_peak() - (own_memory() - own_share())} {seconds}", flush=True)


if __name__ == "__main__":
    main()
