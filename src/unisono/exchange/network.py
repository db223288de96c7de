"""Exchange between hosts, over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.exchange import TELEMETRY_BYTES, Combine, Committed, Deferred, Parcel, Share, check_reduced
from unisono.exchange.context import Context
from unisono.exchange.delivering import Courier
from unisono.exchange.flat import ROW_BYTES, Rows, Slot, blocks, divide_rows, parts_of
from unisono.exchange.private import PrivateSlots
from unisono.exchange.reduce import Reduction
from unisono.exchange.stream import Ballot, Stream
from unisono.exchange.wire import Wire

__all__ = ["Network", "broadcast_over", "build"]


def build(context: Context) -> Network:
    """Return the exchange of members on any hosts and devices."""
    return Network(context.open_wire("all", range(sum(map(len, context.hosts)))))


class Network(PrivateSlots):
    """Chunks are sent to their owners, and the sums back, over a `Wire`: between processors in a stream of messages,
    between GPUs by collectives.
    """

    def __init__(self, wire: Wire) -> None:
        # With room for padding behind every part, wherever the part begins.
        super().__init__(
            wire.device, lambda layout: max(layout.slot_bytes, (layout.num_rows + wire.size - 1) * ROW_BYTES)
        )
        self._wire = wire
        self.rank = wire.rank
        self.size = wire.size
        self._courier = Courier(wire.rank, [range(rank, rank + 1) for rank in range(wire.size)], wire=wire)
        self._kind: type[Reduction | Stream] = Stream if wire.device.type == "cpu" else Reduction
        self._offered: _Sums | None = None

    def offer(self, share: Share, rows_ready: int) -> None:
        if self._offered is None:
            self._offered = _Sums(self._kind, self._wire, self, share, [range(self.layout.num_rows)])
        self._offered.send(0, rows_ready)

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> Combine:
        chosen = parts_of(self.layout, parts)
        offered, self._offered = self._offered, None
        if offered is not None and len(chosen) > 1:
            raise ValueError(f"rows were offered for a combine in one part, and it begins with {len(chosen)}")
        sums = offered or _Sums(self._kind, self._wire, self, share, chosen)
        self._wire.meter.arrive(self.rank)
        return _NetworkCombine(self._wire, self, chosen, sums)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._wire.all_gather_bytes(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        broadcast_over(self._wire, tensor, source)

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return self._courier.deliver(parcels)

    def interrupt(self, error: Exception) -> None:
        self._wire.interrupt(error)

    def close(self) -> None:
        super().close()
        self._wire.close()


class _Sums:
    """The sums of a combine, from the first rows that are sent on. Waits for nobody before the first `send`."""

    def __init__(
        self,
        kind: type[Reduction | Stream],
        wire: Wire,
        slots: PrivateSlots,
        share: Share,
        parts: Sequence[range],
    ) -> None:
        self._kind = kind
        self._wire = wire
        self._slots = slots
        self._share = share
        self._nodes = {node: Rows(slot.memory, 0) for node, slot in share.slots.items()}
        self._parts = parts
        self._ballot: Ballot | None = None
        self._by_part: dict[int, Reduction | Stream] = {}
        self.slot = slots.slot()
        wire.sent_bytes = 0
        wire.meter.open()

    def send(self, part: int, rows_ready: int) -> None:
        """Send what is complete within the first ``rows_ready`` rows of a part."""
        if part not in self._by_part:
            self._by_part[part] = self._begin(part)
        self._by_part[part].send(self._nodes, rows_ready)

    def _begin(self, part: int) -> Reduction | Stream:
        wire, slots, rows, memory = self._wire, self._slots, self._parts[part], self.slot.memory
        if self._kind is Reduction and part < len(self._parts) - 1:  # behind the last part there is room for padding
            memory = memory[: rows.stop * ROW_BYTES]
        if self._kind is Stream and self._ballot is None:
            self._ballot = Ballot(wire, TELEMETRY_BYTES)
        plan, num_leaves = self._share.plan, self._share.num_leaves
        return self._kind(wire, slots.layout, rows, plan, num_leaves, Rows(memory, 0), slots.multipliers)

    def fold(self, part: int) -> int:
        """Wait until this member has added up its chunks of a part; return their digest."""
        return self._by_part[part].fold()

    def vote(self, digest: int, data: bytes) -> tuple[int, list[bytes]]:
        """Wait until this member holds all sums, say so to the others, and wait until they do (see `Wire.vote`)."""
        if self._ballot is not None:
            return self._ballot.vote(digest, data)
        for each in self._by_part.values():
            each.gather()
        return self._wire.vote(digest, data)


class _NetworkCombine:
    """
    Args:
        sums: some rows of offered ones are sent already.
    """

    def __init__(self, wire: Wire, slots: PrivateSlots, parts: Sequence[range], sums: _Sums) -> None:
        self._wire = wire
        self._slots = slots
        self._parts = parts
        self._sums = sums
        self._is_taken = False
        self._reduced: set[int] = set()
        self._collected: set[int] = set()
        self._digest = 0
        self._total = 0.0

    def publish(self, part: int) -> Deferred[None]:
        self._sums.send(part, len(self._parts[part]))
        return Deferred(lambda: None)

    def reduce(self, part: int) -> Deferred[None]:
        return Deferred(partial(self._reduce, part))

    def _reduce(self, part: int) -> None:
        self._digest += self._sums.fold(part)
        self._reduced.add(part)

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        check_reduced(self._reduced, len(self._parts))
        return Deferred(partial(self._commit, telemetry))

    def _commit(self, telemetry: bytes) -> Committed:
        digest, everyones = self._sums.vote(self._digest & 0xFFFFFFFFFFFFFFFF, telemetry)
        self._total = float(self._sums.slot.scalars[0])
        return Committed(digest, tuple(everyones), self._total, self._wire.spent, self._wire.sent_bytes)

    def result(self) -> Slot:
        self._is_taken = True
        return self._sums.slot

    def collect(self, part: int, out: Slot) -> Deferred[None]:
        return Deferred(partial(self._collect, part, out))

    def _collect(self, part: int, out: Slot) -> None:
        rows = self._parts[part]
        for first, end in blocks(rows.start, rows.stop, self._wire.device):
            divide_rows(self._slots.layout, Rows(self._sums.slot.memory, 0), self._total, first, end, out)
        self._collected.add(part)
        if len(self._collected) == len(self._parts) and not self._is_taken:
            self._slots.release(self._sums.slot)


def broadcast_over(wire: Wire, tensor: Tensor, source: int) -> None:
    """Broadcast a tensor of any dtype, device and stride as bytes."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    # A copy on both sides: a collective that was abandoned may go on to read and to write.
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, device=wire.device)
    if wire.rank == source:
        flat.copy_(tensor)
    wire.broadcast(flat.view(-1).view(torch.uint8), source)
    if wire.rank != source:
        tensor.copy_(flat)
