"""Exchange between hosts, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from unisono.decisions.tree import Node
from unisono.exchange import TELEMETRY_BYTES, Combine, Committed, Deferred, Share, check_reduced
from unisono.exchange.context import Context
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
        self._offered: _Opened | None = None

    def offer(self, share: Share, rows_ready: int) -> None:
        if self._offered is None:
            self._offered = self._open(share, [range(self.layout.num_rows)])
        self._offered.sums[0].send(rows_of(share), rows_ready)

    def _open(self, share: Share, parts: Sequence[range]) -> _Opened:
        self._wire.sent_bytes = 0
        slot = self.slot()
        out = Rows(slot.memory, 0)
        plan, num_leaves, multipliers = share.plan, share.num_leaves, self.multipliers
        if self._wire.device.type == "cuda":
            sums: list[Reduction | Stream] = []
            for part in parts:
                # Behind the last part there is room for padding; behind the others are rows of the next.
                end = None if part.stop == self.layout.num_rows else part.stop * ROW_BYTES
                own = Rows(slot.memory[:end], 0)
                sums.append(Reduction(self._wire, self.layout, part, plan, num_leaves, own, multipliers))
            return _Opened(slot, sums, self._wire.vote)
        sums = [Stream(self._wire, self.layout, part, plan, num_leaves, out, multipliers) for part in parts]
        return _Opened(slot, sums, Ballot(self._wire, TELEMETRY_BYTES).vote)

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> Combine:
        self._wire.waiting_s = 0.0
        chosen = parts_of(self.layout, parts)
        offered, self._offered = self._offered, None
        if offered is not None and len(chosen) > 1:
            raise ValueError(f"rows were offered for a combine in one part, and it begins with {len(chosen)}")
        opened = partial(self._open, share, chosen) if offered is None else lambda: offered
        return _NetworkCombine(self._wire, self, share, chosen, opened)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._wire.all_gather_bytes(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        broadcast_over(self._wire, tensor, source)

    def interrupt(self, error: Exception) -> None:
        self._wire.interrupt(error)

    def close(self) -> None:
        super().close()
        self._wire.close()


@dataclass(frozen=True)
class _Opened:
    """What a combine is made of, before it begins."""

    slot: Slot
    """For the sums."""
    sums: Sequence[Reduction | Stream]
    """By part; some rows of an offered one are sent already."""
    vote: Callable[[int, bytes], tuple[int, list[bytes]]]


class _NetworkCombine:
    """
    Args:
        open_sums: called at the first publish; it may wait for the group of the members to form.
    """

    def __init__(
        self,
        wire: Wire,
        slots: PrivateSlots,
        share: Share,
        parts: Sequence[range],
        open_sums: Callable[[], _Opened],
    ) -> None:
        self._wire = wire
        self._slots = slots
        self._share = share
        self._parts = parts
        self._open_sums = open_sums
        self._is_taken = False
        self._reduced: set[int] = set()
        self._collected: set[int] = set()
        self._digest = 0
        self._total = 0.0

    @cached_property
    def _opened(self) -> _Opened:
        return self._open_sums()

    def publish(self, part: int) -> Deferred[None]:
        self._opened.sums[part].send(rows_of(self._share), len(self._parts[part]))
        return Deferred(lambda: None)

    def reduce(self, part: int) -> Deferred[None]:
        return Deferred(partial(self._reduce, part))

    def _reduce(self, part: int) -> None:
        self._digest += self._opened.sums[part].fold()
        self._reduced.add(part)

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        check_reduced(self._reduced, len(self._parts))
        return Deferred(partial(self._commit, telemetry))

    def _commit(self, telemetry: bytes) -> Committed:
        for each in self._opened.sums:
            each.gather()
        digest, everyones = self._opened.vote(self._digest & 0xFFFFFFFFFFFFFFFF, telemetry)
        self._total = float(self._opened.slot.scalars[0])
        return Committed(digest, tuple(everyones), self._total, self._wire.waiting_s)

    def result(self) -> Slot:
        self._is_taken = True
        return self._opened.slot

    def collect(self, part: int, out: Slot) -> Deferred[None]:
        return Deferred(partial(self._collect, part, out))

    def _collect(self, part: int, out: Slot) -> None:
        rows = self._parts[part]
        for first, end in blocks(rows.start, rows.stop, self._wire.device):
            divide_rows(self._slots.layout, Rows(self._opened.slot.memory, 0), self._total, first, end, out)
        self._collected.add(part)
        if len(self._collected) == len(self._parts) and not self._is_taken:
            self._slots.release(self._opened.slot)


def rows_of(share: Share) -> dict[Node, Rows]:
    return {node: Rows(slot.memory, 0) for node, slot in share.slots.items()}


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
