"""Payloads that the members of a host exchange between steps."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.shared_memory import Segment

__all__ = ["Gathering"]

LEAST_BYTES = 4096


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
