"""A copy of what an evaluation depends on: the models of one step, while the training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.state.packing import pack, unpack
from unisono.state.tracked import Tracked

__all__ = ["Kept"]


class Kept:
    """A copy of the tracked modules, as they are now, and of tracked values; not of optimizers. Local."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self.packed = pack(tracked.seen(), "tracked").copied()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the tracked objects as they were, and after the block as they are now, bit by bit."""
        now = Kept(self._tracked)
        self._load()
        try:
            yield
        finally:
            now._load()

    def _load(self) -> None:
        with torch.no_grad():
            self._tracked.load_seen(unpack(self.packed.skeleton, self.packed.tensors))
