"""Exchange of members on one host, in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from unisono.exchange import Combine, Committed, Deferred, Parcel, Share, Work
from unisono.exchange.context import Context
from unisono.exchange.delivering import Courier
from unisono.exchange.flat import fold_rows, parts_of, split_rows
from unisono.exchange.host import Host, HostCombine, HostSlots
from unisono.exchange.spent import Spent

__all__ = ["SharedMemory", "build"]


def build(context: Context) -> SharedMemory:
    """Return the exchange of the members of one host."""
    return SharedMemory(context.open_host())


class SharedMemory(HostSlots):
    """Nodes lie in shared memory and are read in place: each row is read once from every node.

    Args:
        host: all members of the generation.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.rank = host.rank
        self.size = host.size
        self._courier = Courier(host.rank, [range(host.size)], host=host)

    def work(self) -> tuple[Work, Sequence[int]] | None:
        return self._host.work, range(self.size)

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> Combine:
        chunks = [split_rows(part, self.size) for part in parts_of(self._layout, parts)]
        return _SharedCombine(self._host, self._layout, share, chunks)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._host.all_gather(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._host.broadcast(tensor, source)

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return self._courier.deliver(parcels)

    def interrupt(self, error: Exception) -> None:
        self._host.counters.interrupt(error)

    def close(self) -> None:
        self._host.close()


class _SharedCombine(HostCombine):
    def sum_chunk(self, part: int) -> int:
        rows = self.chunks[part][self.host.rank].rows
        if not rows:
            return 0
        num_leaves, out = self.share.num_leaves, [self.own_sum(part)]
        multipliers = self.layout.multipliers
        return fold_rows(self.layout, self.nodes, num_leaves, rows.start, rows.stop, out, multipliers=multipliers)

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        digest = self.digest()
        self.publish_telemetry(telemetry)
        return Deferred(partial(self._commit, self.count_reduced(digest)))

    def _commit(self, committed: Deferred[int]) -> Committed:
        digest = committed.wait()
        return Committed(digest, tuple(self.telemetry()), self.total_weight(), Spent(self.waits))
