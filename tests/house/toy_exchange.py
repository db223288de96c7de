"""An exchange that the library does not know, in a training: everything goes through the head's key-value store.

``unisono run --exchange toy toy_exchange.py``
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn

import unisono
from unisono.decisions.tree import Node
from unisono.exchange import Committed, Deferred, Share
from unisono.exchange.context import Context
from unisono.exchange.flat import FlatLayout, Rows, Slot, divide_rows, fold_rows, parts_of
from unisono.exchange.pool import Pool
from unisono.rounds.connect import EXCHANGES


def blank(layout: FlatLayout) -> Tensor:
    return torch.zeros(layout.slot_bytes, dtype=torch.uint8)


class ThroughTheHead:
    """Every member stores its nodes, reads those of all others, and sums all rows by itself."""

    def __init__(self, context: Context) -> None:
        self.rank, self.size = context.rank, sum(map(len, context.hosts))
        self._store, self._turn, self._error = context.store("toy"), 0, None
        self._pool = Pool(blank)

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self.layout = layout
        self._pool.keep(layout, slots)
        return list(slots)

    def slot(self) -> Slot:
        return self._pool.slot()

    def release(self, slot: Slot) -> None:
        self._pool.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass

    def work(self) -> None:
        return None

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> _Sum:
        return _Sum(self, share, parts_of(self.layout, parts))

    def all_gather(self, data: bytes) -> list[bytes]:
        if self._error is not None:
            raise self._error
        self._turn += 1
        self._store.set(f"{self._turn}/{self.rank}", data)
        return [self._store.get(f"{self._turn}/{rank}") for rank in range(self.size)]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        own = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if self.rank == source else b""
        sent = bytearray(self.all_gather(own)[source])
        if self.rank != source and sent:
            tensor.copy_(torch.frombuffer(sent, dtype=tensor.dtype).view(tensor.shape))

    def interrupt(self, error: Exception) -> None:
        self._error = error

    def close(self) -> None:
        self._pool.clear()


class _Sum:
    def __init__(self, exchange: ThroughTheHead, share: Share, parts: tuple[range, ...]) -> None:
        self._exchange, self._share, self._parts = exchange, share, parts
        self._layout, self._digest = exchange.layout, 0
        self._sums = Slot(self._layout, blank(self._layout))

    def publish(self, part: int) -> Deferred[None]:
        return Deferred(lambda: None)

    def reduce(self, part: int) -> Deferred[None]:
        return Deferred(lambda: self._reduce(self._parts[part]))

    def _reduce(self, part: range) -> None:
        slots, leaves = self._share.slots, self._share.num_leaves
        own = [(node.level, node.index, bytes(slots[node].rows(part.start, part.stop).tolist())) for node in slots]
        nodes = {
            Node(level, index): Rows(torch.frombuffer(bytearray(data), dtype=torch.uint8), part.start)
            for payload in self._exchange.all_gather(msgspec.msgpack.encode(own))
            for level, index, data in msgspec.msgpack.decode(payload)
        }
        sums, factors = [Rows(self._sums.memory, 0)], self._layout.multipliers
        self._digest += fold_rows(self._layout, nodes, leaves, part.start, part.stop, sums, multipliers=factors)

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        total, digest = float(self._sums.scalars[0]), self._digest & 0xFFFFFFFFFFFFFFFF
        return Deferred(lambda: Committed(digest, tuple(self._exchange.all_gather(telemetry)), total, waiting_s=0.0))

    def result(self) -> Slot:
        return self._exchange.slot()

    def collect(self, part: int, out: Slot) -> Deferred[None]:
        sums, total, rows = Rows(self._sums.memory, 0), float(self._sums.scalars[0]), self._parts[part]
        return Deferred(lambda: divide_rows(self._layout, sums, total, rows.start, rows.stop, out))


def main() -> None:
    EXCHANGES["toy"] = ThroughTheHead
    with unisono.Run(seed=5) as run:
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(list(torch.randn(48, 6)), batch_size=12, microbatches=6, epochs=2):
            for batch in step:
                step.backward(model(batch).square().mean())
            optimizer.step()


if __name__ == "__main__":
    main()
