"""Exchange of a run with one member: the sum needs no exchange."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from unisono.decisions.tree import root
from unisono.exchange import Combine, Committed, Deferred, Parcel, Share, check_reduced
from unisono.exchange.flat import Rows, Slot, blocks, digest_rows, divide_rows, parts_of
from unisono.exchange.private import PrivateSlots

__all__ = ["Alone"]


class Alone(PrivateSlots):
    """The exchange of a run with one worker. Opens nothing."""

    rank = 0
    size = 1

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> Combine:
        return _AloneCombine(self, share, parts_of(self.layout, parts))

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return 0

    def interrupt(self, error: Exception) -> None:
        pass


class _AloneCombine:
    """The combine of one member. Its commit divides in place, in the pass over the memory that takes the digest."""

    def __init__(self, slots: PrivateSlots, share: Share, parts: Sequence[range]) -> None:
        self._slots = slots
        self._share = share
        self._parts = parts
        self._reduced: set[int] = set()

    def publish(self, part: int) -> Deferred[None]:
        return Deferred(lambda: None)

    def reduce(self, part: int) -> Deferred[None]:
        return Deferred(partial(self._reduced.add, part))

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        check_reduced(self._reduced, len(self._parts))
        return Deferred(partial(self._commit, telemetry))

    def _commit(self, telemetry: bytes) -> Committed:
        slot, layout = self.result(), self._slots.layout
        rows, total = Rows(slot.memory, 0), float(slot.scalars[0])
        digest = 0
        for first, end in blocks(0, layout.num_rows, slot.memory.device):
            digest += digest_rows(rows, self._slots.multipliers, first, end)
            divide_rows(layout, rows, total, first, end, slot)
        return Committed(digest & 0xFFFFFFFFFFFFFFFF, (telemetry,), total)

    def result(self) -> Slot:
        return self._share.slots[root(self._share.num_leaves)]

    def collect(self, part: int, out: Slot) -> Deferred[None]:
        return Deferred(partial(self._collect, self._parts[part], out))

    def _collect(self, rows: range, out: Slot) -> None:
        if out is not self.result():
            out.rows(rows.start, rows.stop).copy_(self.result().rows(rows.start, rows.stop))
