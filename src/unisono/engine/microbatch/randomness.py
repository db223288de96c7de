"""Random numbers that depend on the position in the run, not on the worker.

The generators of torch, the accelerator, numpy and random are set from ``(seed, position)`` before everything that
may draw: the head of a step, a micro-batch, a sample. Setting ``torch.default_generator`` takes a microsecond,
where ``torch.manual_seed`` visits the generators of every kind of device.
"""

from __future__ import annotations

import random
import sys

import torch

from unisono.core.cursor import seed_of
from unisono.system import accelerators

__all__ = ["seed_at", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Set the global generators of torch, the accelerator, numpy (if it was imported) and random. ``seed``: 64 bits."""
    torch.default_generator.manual_seed(seed)
    if (accelerator := accelerators.used()) is not None:
        accelerator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_at(seed: int, *position: int | str) -> None:
    """Set all generators for one position in a run, e.g. ``seed_at(7, "microbatch", step, index)``."""
    seed_everything(seed_of(seed, *position))
