"""An exchange that the library does not know, in a training: nodes meet in the run's store, every member sums them all.

``unisono run --exchange toy toy_exchange.py``
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from msgspec.msgpack import decode, encode
from torch import Tensor, nn

import unisono
from unisono.decisions.tree import Node
from unisono.exchange import Combine, Committed, Deferred, Parcel, Share, check_reduced
from unisono.exchange.context import Context
from unisono.exchange.delivering import deliver_by_broadcast
from unisono.exchange.flat import Rows, Slot, divide_rows, fold_rows, parts_of
from unisono.exchange.private import PrivateSlots
from unisono.rounds.connect import EXCHANGES


class StoreExchange(PrivateSlots):
    def __init__(self, context: Context) -> None:
        super().__init__(context.device)
        self.rank, self.size = context.rank, sum(map(len, context.hosts))
        self._store, self._turns = context.store("sums"), itertools.count()

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> Combine:
        return StoreCombine(self, share, parts_of(self.layout, parts))

    def put(self, data: bytes) -> Deferred[list[bytes]]:
        """Leave this member's data; the handle waits for everyone's."""
        turn = next(self._turns)
        self._store.set(f"{turn}-{self.rank}", data.hex())
        keys = [f"{turn}-{rank}" for rank in range(self.size)]
        return Deferred(lambda: [bytes.fromhex(self._store.get(key).decode()) for key in keys])

    def all_gather(self, data: bytes) -> list[bytes]:
        return self.put(data).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        own = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        if data := self.all_gather(own if self.rank == source else b"")[source]:
            tensor.detach().copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape))

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return deliver_by_broadcast(self, parcels)

    def interrupt(self, error: Exception) -> None:
        pass  # a store's wait ends by itself


class StoreCombine:
    def __init__(self, exchange: StoreExchange, share: Share, parts: Sequence[range]) -> None:
        self._exchange, self._share, self._parts, self._layout = exchange, share, parts, exchange.layout
        self._sum = Slot(self._layout, torch.zeros(self._layout.slot_bytes, dtype=torch.uint8))
        self._published: dict[int, Deferred[list[bytes]]] = {}
        self._digests: dict[int, int] = {}

    def publish(self, part: int) -> Deferred[None]:
        first, end = self._parts[part].start, self._parts[part].stop
        own = [(*node, bytes(slot.rows(first, end).numpy())) for node, slot in self._share.slots.items()]
        self._published[part] = self._exchange.put(encode(own))
        return Deferred(lambda: None)

    def reduce(self, part: int) -> Deferred[None]:
        return Deferred(lambda: self._reduce(part))

    def _reduce(self, part: int) -> None:
        first, end = self._parts[part].start, self._parts[part].stop
        nodes, out, factors = dict[Node, Rows](), [Rows(self._sum.memory, 0)], self._exchange.multipliers
        for level, index, data in itertools.chain(*map(decode, self._published[part].wait())):
            nodes[Node(level, index)] = Rows(torch.frombuffer(bytearray(data or 512), dtype=torch.uint8), first)
        leaves = self._share.num_leaves
        self._digests[part] = fold_rows(self._layout, nodes, leaves, first, end, out, multipliers=factors)

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        check_reduced(self._digests, len(self._parts))
        told, digest = self._exchange.put(telemetry), sum(self._digests.values()) % 2**64
        return Deferred(lambda: Committed(digest, tuple(told.wait()), float(self._sum.scalars[0])))

    def result(self) -> Slot:
        return next(iter(self._share.slots.values()), None) or self._exchange.slot()

    def collect(self, part: int, out: Slot) -> Deferred[None]:
        rows, sums, total = self._parts[part], Rows(self._sum.memory, 0), float(self._sum.scalars[0])
        return Deferred(lambda: divide_rows(self._layout, sums, total, rows.start, rows.stop, out))


def main() -> None:
    EXCHANGES["toy"] = StoreExchange
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
