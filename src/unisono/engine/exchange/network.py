"""Exchange between hosts, over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.routes import rows_for
from unisono.engine.exchange import TELEMETRY_BYTES, Combine, Committed, Parcel, Share
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.delivering import Courier
from unisono.engine.exchange.flat import ROW_BYTES, Rows, Slot, blocks, divide_rows
from unisono.engine.exchange.private import PrivateSlots
from unisono.engine.exchange.reduce import Reduction
from unisono.engine.exchange.stream import Ballot, RangeSum
from unisono.engine.exchange.wire import Wire

__all__ = ["Network", "build"]


def build(context: Context) -> Network:
    """Return the exchange of members on any hosts and devices."""
    return Network(context.open_wire("all", range(sum(map(len, context.hosts)))))


class Network(PrivateSlots):
    """Chunks are sent to their owners, and the sums back, over a `Wire`: between processors in a stream of messages,
    between GPUs by collectives.
    """

    def __init__(self, wire: Wire) -> None:
        # With room for padding behind the rows.
        super().__init__(
            wire.device, lambda layout: max(layout.slot_bytes, (layout.num_rows + wire.size - 1) * ROW_BYTES)
        )
        self.wire = wire
        self.rank = wire.rank
        self.size = wire.size
        self._courier = Courier(wire.rank, [range(rank, rank + 1) for rank in range(wire.size)], wire=wire)
        self.kind: type[Reduction | RangeSum] = RangeSum if wire.device.type == "cpu" else Reduction
        self._offered: _NetworkCombine | None = None

    @property
    def wants_earlier(self) -> bool:
        return self.wire.coder.is_used

    def offer(self, share: Share, rows_ready: int) -> None:
        if self._offered is None:
            self._offered = _NetworkCombine(self, share)
        self._offered.send(rows_ready)

    def begin(self, share: Share) -> Combine:
        offered, self._offered = self._offered, None
        return offered or _NetworkCombine(self, share)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self.wire.all_gather_bytes(data)

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return self._courier.deliver(parcels)

    def interrupt(self, error: Exception) -> None:
        self.wire.interrupt(error)

    def close(self) -> None:
        super().close()
        self.wire.close()


class _NetworkCombine:
    """One combine, from the first rows that are sent on. Waits for nobody before the first `send`."""

    def __init__(self, exchange: Network, share: Share) -> None:
        self._exchange = exchange
        self._share = share
        self._nodes = {node: Rows(slot.memory, 0) for node, slot in share.slots.items()}
        self._ballot: Ballot | None = None
        self._sum: Reduction | RangeSum | None = None
        self._out = exchange.slot()
        self._digest = 0
        self._total = 0.0
        exchange.wire.sent_bytes = 0

    def send(self, rows_ready: int) -> None:
        """Send what is complete within the first ``rows_ready`` rows."""
        if self._sum is None:
            self._sum = self._begin()
        self._sum.send(self._nodes, rows_ready)

    def _begin(self) -> Reduction | RangeSum:
        wire, layout, share = self._exchange.wire, self._exchange.layout, self._share
        if self._exchange.kind is RangeSum:
            self._ballot = Ballot(wire, TELEMETRY_BYTES)
        rows, out, factors = range(layout.num_rows), Rows(self._out.memory, 0), self._exchange.multipliers
        if self._exchange.kind is Reduction:  # a collective brings all sums to all
            return Reduction(wire, layout, rows, share.plan, share.num_leaves, out, factors)
        return RangeSum(wire, layout, rows, share.plan, share.num_leaves, out, factors, share.routes)

    def publish(self) -> None:
        self.send(self._exchange.layout.num_rows)

    def reduce(self) -> None:
        assert self._sum is not None  # `publish` has sent all rows
        self._digest = self._sum.fold()

    def commit(self, telemetry: bytes) -> Committed:
        if self._ballot is not None:
            digest, everyones = self._ballot.vote(self._digest, telemetry)
        else:
            assert self._sum is not None
            self._sum.gather()
            digest, everyones = self._exchange.wire.vote(self._digest, telemetry)
        self._total = float(self._out.scalars[0])
        return Committed(digest, tuple(everyones), self._exchange.wire.sent_bytes)

    def collect(self, out: Slot | None = None) -> Slot:
        layout, found = self._exchange.layout, self._out if out is None else out
        for rows in rows_for(self._share.routes, self._exchange.rank, range(layout.num_rows)):
            for first, end in blocks(rows.start, rows.stop, self._exchange.wire.device):
                divide_rows(layout, Rows(self._out.memory, 0), self._total, first, end, found)
        if found is not self._out:
            self._exchange.release(self._out)
        return found
