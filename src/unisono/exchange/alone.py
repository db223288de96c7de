"""One member: the sum is already here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.decisions.tree import root
from unisono.exchange import Combined, Share, Work
from unisono.exchange.flat import FlatLayout, Rows, Slot, blocks, digest_rows, divide_rows
from unisono.exchange.pool import Pool

__all__ = ["Alone"]


class Alone:
    """The exchange of a run with one worker. Opens nothing."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = Pool(lambda layout: torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=device))

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._layout = layout
        self._multipliers = layout.multipliers.to(self._device)
        self._pool.keep(layout, slots)
        return list(slots)

    def slot(self) -> Slot:
        return self._pool.slot()

    def release(self, slot: Slot) -> None:
        self._pool.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass

    def work(self) -> tuple[Work, Sequence[int]] | None:
        return None

    def combine(self, share: Share, facts: Sequence[float]) -> Combined:
        slot = share.slots[root(share.num_leaves)]
        total = float(slot.scalars[0])
        digest = 0
        for row, end_row in blocks(0, self._layout.num_rows, self._device):
            digest += digest_rows(Rows(slot.memory, 0), self._multipliers, row, end_row)
            divide_rows(self._layout, Rows(slot.memory, 0), total, row, end_row, slot)
        return Combined(slot, digest & 0xFFFFFFFFFFFFFFFF, (tuple(facts),), waiting_s=0.0)

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def interrupt(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        self._pool.clear()
