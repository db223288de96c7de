"""The exchange of members that have only a network between them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.exchange import NUM_FACTS, Combined, Share, Work
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Rows, Slot, blocks, divide_rows
from unisono.exchange.pool import Pool
from unisono.exchange.reduce import Reduction, padded_rows
from unisono.exchange.wire import Wire
from unisono.faults import point

__all__ = ["Network", "broadcast_over"]

# The commit: everyone tells everyone, after it holds all sums, its part of the digest and its facts.
_VOTE = struct.Struct(f"<Q{NUM_FACTS}d")


class Network:
    """Chunks are sent to their owners, and the sums back, over a `Wire`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.rank = wire.rank
        self.size = wire.size
        self._pool = Pool(self._allocate)
        self._reduction: Reduction | None = None

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._layout = layout
        self._rows = range(layout.num_rows)
        self._multipliers = layout.multipliers.to(self._wire.device)
        nbytes, device = self._slot_bytes(layout), self._wire.device
        reachable = [slot.memory.numel() >= nbytes and slot.memory.device == device for slot in slots]
        self._pool.keep(layout, itertools.compress(slots, reachable))
        return [slot if can else slot.copy_to(self.slot()) for slot, can in zip(slots, reachable, strict=True)]

    def slot(self) -> Slot:
        return self._pool.slot()

    def release(self, slot: Slot) -> None:
        self._pool.release(slot)

    def _slot_bytes(self, layout: FlatLayout) -> int:
        return max(layout.slot_bytes, padded_rows(range(layout.num_rows), self.size) * ROW_BYTES)

    def _allocate(self, layout: FlatLayout) -> Tensor:
        return torch.zeros(self._slot_bytes(layout), dtype=torch.uint8, device=self._wire.device)

    def offer(self, share: Share, rows_ready: int) -> None:
        if self._reduction is None:
            self._reduction = Reduction(self._wire, self._layout, self._rows, share.plan, share.num_leaves)
        self._reduction.send({node: Rows(slot.memory, 0) for node, slot in share.slots.items()}, rows_ready)

    def work(self) -> tuple[Work, Sequence[int]] | None:
        return None

    def combine(self, share: Share, facts: Sequence[float]) -> Combined:
        wire = self._wire
        wire.waiting_s = 0.0
        self.offer(share, self._layout.num_rows)
        point("published")
        assert self._reduction is not None
        result = self.slot()
        part = self._reduction.finish(result.memory, self._multipliers)
        self._reduction = None
        point("reduced")
        vote = torch.frombuffer(bytearray(_VOTE.pack(part, *facts)), dtype=torch.uint8).to(wire.device)
        votes = torch.empty(self.size * _VOTE.size, dtype=torch.uint8, device=wire.device)
        wire.all_gather(votes, vote).wait()
        cast = list(_VOTE.iter_unpack(bytes(votes.tolist())))
        total = float(result.scalars[0])
        for first, end in blocks(0, self._layout.num_rows, wire.device):
            divide_rows(self._layout, Rows(result.memory, 0), total, first, end, result)
        for slot in share.slots.values():
            self.release(slot)
        digest = sum(vote[0] for vote in cast) & 0xFFFFFFFFFFFFFFFF
        return Combined(result, digest, tuple(vote[1:] for vote in cast), wire.waiting_s)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._wire.all_gather_bytes(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        broadcast_over(self._wire, tensor, source)

    def interrupt(self, error: Exception) -> None:
        self._wire.interrupt(error)

    def close(self) -> None:
        self._pool.clear()
        self._wire.close()


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
