"""The exchange of members that share the memory of one host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.exchange import Combined, Share
from unisono.exchange.host import Board, Host, split_rows
from unisono.flat import FlatLayout, Slot, fold_rows

__all__ = ["SharedMemory", "broadcast_by_letter"]


class SharedMemory:
    """Nodes lie in shared memory and are read in place: each row is read once from every node.

    Args:
        board: this member's own board.
        addresses: the boards of all members, by rank.
    """

    def __init__(self, board: Board, addresses: Sequence[str], rank: int, *, timeout_s: float) -> None:
        self._host = Host(board, addresses, rank, timeout_s=timeout_s)
        self.rank = rank
        self.size = len(addresses)

    def prepare(self, layout: FlatLayout) -> None:
        self._host.all_gather(b"")  # nobody reads the old slots any more
        self._layout = layout
        self._chunks = split_rows(layout.num_rows, self.size)
        self._host.prepare(layout)

    def slot(self) -> Slot:
        return self._host.slot()

    def release(self, slot: Slot) -> None:
        self._host.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass

    def combine(self, share: Share, facts: Sequence[float]) -> Combined:
        host, chunk = self._host, self._chunks[self.rank]
        host.waiting_s = 0.0
        host.publish(share.slots, facts)
        everyones_facts = tuple(host.facts())
        digest = 0
        if chunk:
            digest = fold_rows(
                self._layout,
                host.nodes(),
                share.num_leaves,
                chunk.start,
                chunk.stop,
                [host.result(chunk.start, chunk.stop)],
                multipliers=self._layout.multipliers,
            )
        host.commit(digest)
        slots = list(share.slots.values()) or [host.slot()]
        digest = host.collect(self._chunks, host.total_weight(self._chunks), slots[0])
        for slot in slots[1:]:
            host.release(slot)
        return Combined(slots[0], digest, everyones_facts, host.waiting_s)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._host.all_gather(data)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        broadcast_by_letter(self._host, tensor, source)

    def interrupt(self, error: Exception) -> None:
        self._host.interrupt(error)

    def close(self) -> None:
        self._host.close()


def broadcast_by_letter(host: Host, tensor: Tensor, source: int) -> None:
    """Broadcast through `all_gather`: in shared memory that is one copy in and one copy out."""
    flat = tensor.detach().contiguous().cpu()
    letter = b""
    if host.rank == source:
        letter = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
    data = host.all_gather(letter)[source]
    if host.rank != source and data:
        with torch.no_grad():
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape))
