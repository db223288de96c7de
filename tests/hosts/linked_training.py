"""A training whose sums take time on a slow link: ``unisono run linked_training.py -- --steps 30 --gates DIR``.

As `tests.workers.small_training` it stops at gates. The workers of one host may be slow: each of their
micro-batches takes longer from a step on.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.gates import wait_at

WIDTH = 512
"""The gradients are 1 MB, which takes 0.84 s at 10 Mbit/s."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--gates", type=Path, required=True)
    parser.add_argument("--slow-host", default="")
    parser.add_argument("--slow-from", type=int, default=0)
    parser.add_argument("--slow-until", type=int, default=0)
    parser.add_argument("--slow-s", type=float, default=0.0)
    arguments = parser.parse_args()
    with unisono.Run(seed=3, balance=False) as run:
        data = list(torch.randn(64, WIDTH))
        model = nn.Linear(WIDTH, WIDTH)
        run.track(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.01)))
        is_slow = socket.gethostname() == arguments.slow_host
        for step in run.steps(data, batch_size=8, microbatches=4, epochs=arguments.steps, max_steps=arguments.steps):
            wait_at(arguments.gates / str(step.number))
            for batch in step:
                if is_slow and arguments.slow_from <= step.number < arguments.slow_until:
                    time.sleep(arguments.slow_s)
                model(batch).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
