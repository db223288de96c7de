"""Slots in a member's own memory, which no other member can read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.engine.exchange import Share
from unisono.engine.exchange.flat import FlatLayout, Pool, Slot
from unisono.engine.exchange.helping import HostWork
from unisono.system import accelerators

__all__ = ["PrivateSlots"]


class PrivateSlots:
    """Slots of an `Exchange` whose members share no memory, and so cannot help each other, and that codes nothing.

    Args:
        slot_bytes: returns the memory of a slot.
    """

    def __init__(
        self, device: torch.device, slot_bytes: Callable[[FlatLayout], int] = lambda layout: layout.slot_bytes
    ) -> None:
        self.device = device
        self._slot_bytes = slot_bytes
        self.pool = Pool(self._allocate)
        self._read: dict[int, Any] = {}  # by the key of a free slot: after what was launched on it it may be written

    def _allocate(self, layout: FlatLayout) -> Tensor:
        return torch.zeros(self._slot_bytes(layout), dtype=torch.uint8, device=self.device)

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self.layout = layout
        self.multipliers = layout.multipliers.to(self.device)
        nbytes = self._slot_bytes(layout)
        fits = [slot.memory.numel() >= nbytes and slot.memory.device == self.device for slot in slots]
        self.pool.keep(layout, itertools.compress(slots, fits))
        return [slot if fit else slot.copy_to(self.slot()) for slot, fit in zip(slots, fits, strict=True)]

    def slot(self) -> Slot:
        slot = self.pool.slot()
        accelerators.follow(self.device, self._read.pop(slot.key, None))
        return slot

    def release(self, slot: Slot) -> None:
        self._read[slot.key] = accelerators.mark(self.device)  # the next to use it may have a stream of its own
        self.pool.release(slot)

    def work(self) -> tuple[HostWork, Sequence[int]] | None:
        return None

    @property
    def wants_earlier(self) -> bool:
        return False

    def offer(self, share: Share, rows_ready: int) -> None:
        pass

    def close(self) -> None:
        self.pool.clear()
        self._read.clear()
