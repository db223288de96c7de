"""A copy of what an evaluation depends on: the models of one step, while the training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono.state.packing import Packed, pack, unpack
from unisono.state.tracked import Tracked

__all__ = ["Kept", "load_kept"]


class Kept:
    """A copy of the tracked modules, as they are now, and of tracked values; not of optimizers. Local."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        packed = pack(tracked.seen(), "tracked")
        self.packed = Packed(packed.skeleton, [tensor.clone() for tensor in packed.tensors], packed.paths)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the tracked objects as they were, and after the block as they are now, bit by bit."""
        now = Kept(self._tracked)
        load_kept(self._tracked, unpack(self.packed.skeleton, self.packed.tensors))
        try:
            yield
        finally:
            load_kept(self._tracked, unpack(now.packed.skeleton, now.packed.tensors))


def load_kept(tracked: Tracked, state: dict[str, Any]) -> None:
    """Load what a `Kept` has copied, perhaps in another process of the same script.

    Raises:
        UsageError: this script tracks other objects.
    """
    with torch.no_grad():
        tracked.load_seen(state)
