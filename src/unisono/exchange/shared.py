"""The exchange of members that share the memory of one host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from unisono.exchange import Combine, Committed, Deferred, Share, Work, check_reduced
from unisono.exchange.context import Context
from unisono.exchange.flat import FlatLayout, Slot, fold_rows, parts_of, split_rows
from unisono.exchange.host import Host, placed

__all__ = ["SharedMemory", "build"]


def build(context: Context) -> SharedMemory:
    """Return the exchange of the members of one host."""
    return SharedMemory(context.open_host())


class SharedMemory:
    """Nodes lie in shared memory and are read in place: each row is read once from every node.

    Args:
        host: all members of the generation.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.rank = host.rank
        self.size = host.size

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._layout = layout
        return self._host.prepare(layout, slots)

    def slot(self) -> Slot:
        return self._host.slot()

    def release(self, slot: Slot) -> None:
        self._host.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass

    def work(self) -> tuple[Work, Sequence[int]] | None:
        return self._host.work, range(self.size)

    def begin(self, share: Share, parts: Sequence[range] | None = None) -> Combine:
        chunks = [split_rows(part, self.size) for part in parts_of(self._layout, parts)]
        return _SharedCombine(self._host, self._layout, share, chunks)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._host.all_gather(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._host.broadcast(tensor, source)

    def interrupt(self, error: Exception) -> None:
        self._host.counters.interrupt(error)

    def close(self) -> None:
        self._host.close()


class _SharedCombine:
    def __init__(self, host: Host, layout: FlatLayout, share: Share, chunks: Sequence[Sequence[range]]) -> None:
        self._host = host
        self._layout = layout
        self._share = share
        self._chunks = chunks
        self._moves = host.begin(share.slots, placed(chunks))
        self._published: dict[int, Deferred[None]] = {}
        self._reduced: set[int] = set()
        self._digest = 0
        self._total = 0.0

    def publish(self, part: int) -> Deferred[None]:
        self._published[part] = self._moves.publish(part)
        return self._published[part]

    def reduce(self, part: int) -> Deferred[None]:
        return Deferred(partial(self._reduce, part, self._published[part]))

    def _reduce(self, part: int, published: Deferred[None]) -> None:
        published.wait()
        chunk = self._chunks[part][self._host.rank]
        if chunk:
            with self._host.counters.or_leave():
                self._digest += fold_rows(
                    self._layout,
                    self._moves.nodes(),
                    self._share.num_leaves,
                    chunk.start,
                    chunk.stop,
                    [self._moves.sum_of(part)],
                    multipliers=self._layout.multipliers,
                )
        self._reduced.add(part)

    def commit(self, telemetry: bytes) -> Deferred[Committed]:
        check_reduced(self._reduced, len(self._chunks))
        self._moves.tell(telemetry)
        return Deferred(partial(self._await_commit, self._moves.commit(self._digest & 0xFFFFFFFFFFFFFFFF)))

    def _await_commit(self, committed: Deferred[int]) -> Committed:
        digest = committed.wait()
        self._total = self._moves.total_weight()
        telemetry = tuple(self._moves.telemetry())
        return Committed(digest, telemetry, self._total, self._host.counters.waiting_s)

    def result(self) -> Slot:
        return next(iter(self._share.slots.values()), None) or self._host.slot()

    def collect(self, part: int, out: Slot) -> Deferred[None]:
        return Deferred(partial(self._moves.collect, part, self._total, out))
