"""Slots in memory of a worker's own, for sums that outlive the next combine."""

from __future__ import annotations

import torch

from unisono.exchange.flat import FlatLayout, Slot

__all__ = ["Spare"]


class Spare:
    """Slots for the sums of steps, used again and again. All methods are local."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Slot] = []
        self._applied: list[Slot] = []  # they may still be sent to others

    def new_slot(self, layout: FlatLayout) -> Slot:
        """Return a slot; its entries are arbitrary."""
        self._free = [slot for slot in self._free if slot.layout == layout]
        if self._free:
            return self._free.pop()
        return Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=self._device))

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that nobody reads any more."""
        self._free.append(slot)

    def retire(self, slot: Slot, newest: Slot | None) -> None:
        """Take back the slot of a sum that is applied, once it is not ``newest`` any more, which others may need."""
        self._applied.append(slot)
        self._free += [one for one in self._applied if one is not newest]
        self._applied = [one for one in self._applied if one is newest]

    def clear(self) -> None:
        """Forget all slots."""
        self._applied.clear()
        self._free.clear()
