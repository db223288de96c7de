"""Exchange of members on one host, in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.engine.exchange import Combine, Parcel, Share
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.delivering import Courier
from unisono.engine.exchange.flat import FlatLayout, Slot, split_rows
from unisono.engine.exchange.helping import HostWork
from unisono.engine.exchange.host import HostCombine, HostMembers

__all__ = ["SharedMemory", "build"]


def build(context: Context) -> SharedMemory:
    """Return the exchange of the members of one host."""
    return SharedMemory(context.open_host())


class SharedMemory:
    """Nodes lie in shared memory and are read in place: each row is read once from every node.

    Args:
        host: all members of the generation.
    """

    def __init__(self, host: HostMembers) -> None:
        self._host = host
        self.rank = host.rank
        self.size = host.size
        self._courier = Courier(host.rank, [range(host.size)], host=host)

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._layout = layout
        return self._host.prepare(layout, slots)

    def slot(self) -> Slot:
        return self._host.page.slots.slot()

    def release(self, slot: Slot) -> None:
        self._host.page.slots.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass  # nothing can be summed before all members of the host are done

    def work(self) -> tuple[HostWork, Sequence[int]] | None:
        return self._host.work, range(self.size)

    def begin(self, share: Share) -> Combine:
        return HostCombine(self._host, self._layout, share, split_rows(range(self._layout.num_rows), self.size))

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._host.all_gather(data)

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return self._courier.deliver(parcels)

    def interrupt(self, error: Exception) -> None:
        self._host.counters.interrupt(error)

    def close(self) -> None:
        self._host.close()
