"""An exchange that the library does not know, in a training: nodes meet in the run's store, every member sums them all.

``unisono run --exchange toy toy_exchange.py``
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from msgspec.msgpack import decode, encode
from torch import nn

import unisono
from unisono.core.tree import Node
from unisono.engine.exchange import Combine, Committed, Parcel, Share
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.flat import Rows, Slot, divide_rows, fold_rows
from unisono.engine.exchange.private import PrivateSlots
from unisono.engine.rounds.connect import EXCHANGES


class StoreExchange(PrivateSlots):
    def __init__(self, context: Context) -> None:
        super().__init__(context.device)
        self.rank, self.size = context.rank, sum(map(len, context.hosts))
        self._store, self._turns = context.store("sums"), itertools.count()

    def begin(self, share: Share) -> Combine:
        return StoreCombine(self, share)

    def put(self, data: bytes) -> Callable[[], list[bytes]]:
        """Leave this member's data; what this returns waits for everyone's."""
        turn = next(self._turns)
        self._store.set(f"{turn}-{self.rank}", data.hex())
        keys = [f"{turn}-{rank}" for rank in range(self.size)]
        return lambda: [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def all_gather(self, data: bytes) -> list[bytes]:
        return self.put(data)()

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        own = {number: each.tensor for number, each in enumerate(parcels) if each.source == self.rank}
        told = {number: bytes(one.contiguous().view(-1).view(torch.uint8).numpy()) for number, one in own.items()}
        for found in map(decode, self.all_gather(encode(told))):
            for number, data in found.items():
                if data and self.rank in parcels[number].targets:
                    out = parcels[number].tensor
                    out.copy_(torch.frombuffer(bytearray(data), dtype=out.dtype).view(out.shape))
        return 0

    def interrupt(self, error: Exception) -> None:
        pass  # a store's wait ends by itself


class StoreCombine:
    def __init__(self, exchange: StoreExchange, share: Share) -> None:
        self._exchange, self._share, self._layout = exchange, share, exchange.layout
        self._sum = Slot(self._layout, torch.zeros(self._layout.slot_bytes, dtype=torch.uint8))

    def publish(self) -> None:
        rows = self._layout.num_rows
        own = [(*node, bytes(slot.rows(0, rows).numpy())) for node, slot in self._share.slots.items()]
        self._published = self._exchange.put(encode(own))

    def reduce(self) -> None:
        nodes = dict[Node, Rows]()
        for level, index, data in itertools.chain(*map(decode, self._published())):
            nodes[Node(level, index)] = Rows(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
        leaves, rows, factors = self._share.num_leaves, self._layout.num_rows, self._exchange.multipliers
        out = [Rows(self._sum.memory, 0)]
        self._digest = fold_rows(self._layout, nodes, leaves, 0, rows, out, multipliers=factors)

    def commit(self, telemetry: bytes) -> Committed:
        told = self._exchange.all_gather(telemetry)
        return Committed(self._digest, tuple(told))

    def collect(self, out: Slot | None = None) -> Slot:
        out = out or next(iter(self._share.slots.values()), None) or self._exchange.slot()
        sums, total = Rows(self._sum.memory, 0), float(self._sum.scalars[0])
        divide_rows(self._layout, sums, total, 0, self._layout.num_rows, out)
        return out


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
