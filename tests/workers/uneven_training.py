"""A training some of whose ranks take longer for each micro-batch: ``unisono run uneven_training.py -- --extra-s 0.1``.

They sleep; or, with ``--own-clock``, each worker measures itself by a clock that goes on by these times alone: so it is
as slow as a test says, whoever has the cores. ``--walls DIR`` lets each worker write there how long its steps took, by
its own clock: from the end of one turn of the loop to that of the next.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.waiting import WAIT_S
from unisono.engine.rounds import clock as step_clock
from unisono.system import faults

NUM_LEAVES = 8
HELD = 1
"""The rank that others help with ``--helped``."""


class OwnClock:
    """Stands for `time` where a worker measures its steps, and where a fault delays it: it goes on by sleeping only."""

    def __init__(self) -> None:
        self._now = time.perf_counter()

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def wait_for_helpers(pipe: Path) -> None:
    """Block until the others have computed all micro-batches but this one."""
    descriptor, num_computed = os.open(pipe, os.O_RDWR), 0  # also for writing: it never ends
    while num_computed < NUM_LEAVES - 1:
        ready, _, _ = select.select([descriptor], [], [], WAIT_S)
        assert ready, f"the others have computed {num_computed} micro-batches, and no more within {WAIT_S} s"
        num_computed += os.read(descriptor, 1) == b"\n"
    os.close(descriptor)


def tell_that_one_is_computed(pipe: Path) -> None:
    """To `wait_for_helpers`, when that has begun."""
    with pipe.open("w") as file:
        file.write("\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--each-s", type=float, default=0.0, help="how long every rank takes for a micro-batch")
    parser.add_argument("--slow", type=int, default=1, help="the rank that takes longer")
    parser.add_argument("--extra-s", type=float, default=0.0, help="... by so much")
    parser.add_argument("--from-step", type=int, default=0, help="... from this step on")
    parser.add_argument("--until-step", type=int, default=1 << 30, help="... and before this one")
    parser.add_argument("--own-clock", action="store_true", help="nothing else takes time, and nobody waits for it")
    parser.add_argument("--helped", type=Path, help=f"a pipe; rank {HELD} is held in its first micro-batch of a step "
                        "until the others have computed all that it has not started")  # fmt: skip
    parser.add_argument("--helped-step", type=int, default=-1, help="... of this one")
    parser.add_argument("--walls", type=Path)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--unbalanced", action="store_true")
    arguments = parser.parse_args()
    wall: list[float] = []
    clock = OwnClock()
    if arguments.own_clock:
        step_clock.time = faults.time = clock  # type: ignore[attr-defined, assignment]
    spend = clock.sleep if arguments.own_clock else time.sleep
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
            is_helped = arguments.helped is not None and step.number == arguments.helped_step
            for inputs, labels in step:
                if is_helped and run.rank == HELD:
                    wait_for_helpers(arguments.helped)
                    is_helped = False
                spend(arguments.each_s + (arguments.extra_s if is_slow else 0.0))
                step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
                if is_helped:
                    tell_that_one_is_computed(arguments.helped)
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
