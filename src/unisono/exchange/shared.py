"""The exchange of members that share the memory of one host."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.exchange import Combined, Share, Work
from unisono.exchange.flat import FlatLayout, Slot, fold_rows
from unisono.exchange.host import Board, Host, split_rows
from unisono.faults import point

__all__ = ["SharedMemory"]


class SharedMemory:
    """Nodes lie in shared memory and are read in place: each row is read once from every node.

    Args:
        board: this member's own board.
        addresses: the boards of all members, by rank.
        generation: grows from one exchange of the board to the next.
        names: the ids of the workers, by rank, for errors.
    """

    def __init__(
        self,
        board: Board,
        addresses: Sequence[str],
        rank: int,
        *,
        generation: int,
        timeout_s: float,
        names: Sequence[str] = (),
    ) -> None:
        self._host = Host(board, addresses, rank, generation=generation, timeout_s=timeout_s, names=names)
        self.rank = rank
        self.size = len(addresses)

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._host.all_gather(b"")  # nobody is in a combine any more
        self._layout = layout
        self._chunks = split_rows(layout.num_rows, self.size)
        return self._host.prepare(layout, len(self._chunks[self.rank]), slots)

    def slot(self) -> Slot:
        return self._host.slot()

    def release(self, slot: Slot) -> None:
        self._host.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass

    def work(self) -> tuple[Work, Sequence[int]] | None:
        return self._host, range(self.size)

    def combine(self, share: Share, facts: Sequence[float]) -> Combined:
        host = self._host
        host.waiting_s = 0.0
        slots = list(share.slots.values()) or [host.slot()]
        with host.or_leave():
            host.publish(share.slots, facts)
            point("published")
            everyones_facts = tuple(host.facts())
            digest = self._reduce(self._chunks[self.rank], share.num_leaves)
            host.verify()
            point("reduced")
            host.commit(digest)
        digest = host.collect(self._chunks, host.total_weight(self._chunks), slots[0])
        for slot in slots[1:]:
            host.release(slot)
        return Combined(slots[0], digest, everyones_facts, host.waiting_s)

    def _reduce(self, chunk: range, num_leaves: int) -> int:
        """Sum this member's chunk; returns its digest."""
        if not chunk:
            return 0
        out = [self._host.result(chunk.start)]
        multipliers = self._layout.multipliers
        return fold_rows(
            self._layout, self._host.nodes(), num_leaves, chunk.start, chunk.stop, out, multipliers=multipliers
        )

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._host.all_gather(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._host.broadcast(tensor, source)

    def interrupt(self, error: Exception) -> None:
        self._host.interrupt(error)

    def close(self) -> None:
        self._host.close()
