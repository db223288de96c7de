"""Memory through which the members of a host pass tensors on, and payloads between steps: written by one, read by many.

The stage is for tensors. A member writes what others are to read, and counts ``staged``; whoever reads something waits
for that, and counts ``copied``. Both counters grow by one on every member in every turn, whether or not it writes or
reads. The memory has two halves, written in turn; so members write the next turn while others still read this one
(`unisono.engine.exchange.host`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch
from torch import Tensor

from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.shared_memory import Segment

__all__ = ["STAGE_BYTES", "Gathering", "Stage"]

STAGE_BYTES = 4 << 20
"""Of one half: what a member can pass on in one turn."""
LEAST_BYTES = 4096
"""Of the memory for payloads."""


class Stage:
    """The stages of the members of a host, in one generation. A turn is `begin`, `show`, `of` for each writer, `take`.

    Args:
        counters: of the members; whoever calls leaves their generation if a method raises.
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._segment: Segment | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._readers: list[tuple[int, Collection[int]]] = [(0, ()), (0, ())]
        """By half: the turn that has written it last, and who has read that."""

    def begin(self, writes: bool) -> Tensor:
        """Begin a turn; return this member's memory for what it writes, when nobody reads that any more.

        Returns:
            (`STAGE_BYTES`,) uint8; empty if it does not write.
        """
        self.counters.check()
        if not writes:
            return self._memory[:0]
        if self._segment is None:
            self._segment = Segment.create(2 * STAGE_BYTES)
            self._memory = self._segment.tensor()
            self.counters.own.fields.stage = self._segment.address.encode()
        half = (self._turn() + 1) % 2
        turn, readers = self._readers[half]
        if readers:
            self.counters.wait("copied", turn, readers)
        return self._memory[half * STAGE_BYTES : (half + 1) * STAGE_BYTES]

    def show(self, readers: Collection[int]) -> None:
        """Let these members, by their local ranks, read what this member has written; nobody, if it has not."""
        turn = self.counters.advance("staged")
        if readers:
            self._readers[turn % 2] = turn, readers

    def of(self, writer: int) -> Tensor:
        """Return what that member has written in this turn, when it has: (`STAGE_BYTES`,) uint8."""
        self.counters.wait("staged", self._turn(), (writer,))
        memory = self.counters.map(writer, self.counters.pages[writer].fields.stage)
        half = self._turn() % 2
        return memory[half * STAGE_BYTES : (half + 1) * STAGE_BYTES]

    def take(self) -> None:
        """End the turn: this member has read all that it reads."""
        self.counters.advance("copied")

    def close(self) -> None:
        """Give the memory back."""
        if self._segment is not None:
            self._segment.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _turn(self) -> int:
        return self.counters.own.counters["staged"].value


class Gathering:
    """Exchange of payloads among the members of a host, in shared memory."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._fields = counters.own.fields
        self._segment: Segment | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return everyone's ``data``, by local rank."""
        ctypes.memmove(self._payload(len(data)).data_ptr(), data, len(data))
        found = [ctypes.string_at(payload.data_ptr(), payload.numel()) for payload in self._post()]
        self._finish()
        return found

    def close(self) -> None:
        """Give the memory back."""
        if self._segment is not None:
            self._segment.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _payload(self, nbytes: int) -> Tensor:
        """Return (nbytes,) memory into which this member writes its next payload."""
        if self._memory.numel() < nbytes:
            # By doubling, because the other members keep the old segments mapped.
            segment = Segment.create(max(LEAST_BYTES, nbytes, 2 * self._memory.numel()))
            if self._segment is not None:
                self._segment.close()
            self._segment, self._memory = segment, segment.tensor()
            self._fields.payload = segment.address.encode()
        self._fields.payload_bytes = nbytes
        return self._memory[:nbytes]

    def _post(self) -> list[Tensor]:
        """Publish this member's payload, wait for all, and return all payloads, to be read before `_finish`."""
        counters = self._counters
        counters.check()
        counters.wait("posted", counters.advance("posted"))
        pages = [page.fields for page in counters.pages]
        return [counters.map(rank, page.payload)[: page.payload_bytes] for rank, page in enumerate(pages)]

    def _finish(self) -> None:
        """Wait until all have read all payloads, so that any member may write again, or close."""
        self._counters.wait("read", self._counters.advance("read"))
