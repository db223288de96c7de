"""Exchange of a run with one member: the sum needs no exchange."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.tree import root
from unisono.engine.exchange import Combine, Committed, Parcel, Share
from unisono.engine.exchange.flat import Rows, Slot, blocks, digest_there, divide_rows
from unisono.engine.exchange.private import PrivateSlots
from unisono.system.reading import read

__all__ = ["Alone"]


class Alone(PrivateSlots):
    """The exchange of a run with one worker. Opens nothing."""

    rank = 0
    size = 1

    def begin(self, share: Share) -> Combine:
        return _AloneCombine(self, share)

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return 0

    def interrupt(self, error: Exception) -> None:
        pass


class _AloneCombine:
    """The combine of one member. Its commit divides in place, in the pass over the memory that takes the digest."""

    def __init__(self, slots: PrivateSlots, share: Share) -> None:
        self._slots = slots
        self._sum = share.slots[root(share.num_leaves)]

    def publish(self) -> None:
        pass

    def reduce(self) -> None:
        pass

    def commit(self, telemetry: bytes) -> Committed:
        slot, layout = self._sum, self._slots.layout
        rows, digest, total = Rows(slot.memory, 0), 0, 0.0
        for first, end in blocks(0, layout.num_rows, slot.memory.device):  # of a device there is one
            part, weight = read([digest_there(rows, self._slots.multipliers, first, end), slot.scalars[0]])
            digest, total = digest + int(part), float(weight)
            divide_rows(layout, rows, total, first, end, slot)
        return Committed(digest & 0xFFFFFFFFFFFFFFFF, (telemetry,))

    def collect(self, out: Slot | None = None) -> Slot:
        return self._sum if out is None else self._sum.copy_to(out)
