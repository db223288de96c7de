"""Memory in which the workers of a machine leave their heartbeats, for their agent to report.

With 8 workers a machine, a head that hears of all of them from their agent receives an eighth of the messages. Each
worker has a slot: the worker writes its newest heartbeat there and when that was (the clock of all processes of a
machine), and the agent writes which one it has handed to the head. So a worker notices at its next heartbeat that its
agent does not report (it stands still, its connection is broken, it is busy), and speaks for itself until it does.

Nothing is locked: a heartbeat that is read while it is written fails its checksum, and is read again.

A worker also notes each step that is done, without a message, so that its agent can say how far the worker was when its
process has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from typing import Final, NamedTuple

from unisono.system.lifetime import Memory

__all__ = ["NUM_SLOTS", "BeatPage", "BeatSlot", "LeftBeat", "open_slot"]

NUM_SLOTS: Final = 512
"""A machine with more workers has some that always speak for themselves."""
SLOT_BYTES: Final = 1024
_LEFT: Final = struct.Struct("<QdII")
"""Number of the heartbeat, its time, its length, and the checksum of all of that and the heartbeat."""
_TAKEN: Final = struct.Struct("<Q")
_TAKEN_AT: Final = SLOT_BYTES - 64  # on a cache line of its own: it has another writer
_DONE: Final = struct.Struct("<Q")
_DONE_AT: Final = _TAKEN_AT - _DONE.size
_MAX_BYTES: Final = _DONE_AT - _LEFT.size


class LeftBeat(NamedTuple):
    """A heartbeat that a worker has left for its agent."""

    number: int
    at: float
    data: bytes


class BeatSlot:
    """One worker's slot, as the worker sees it (`leave`, `note_step`) and as its agent does (`read`,
    `take`, `step`).

    Args:
        index: of the slot on its page.
    """

    def __init__(self, page: mmap.mmap, index: int) -> None:
        self._page = page
        self._start = index * SLOT_BYTES
        self._number = 0

    def leave(self, data: bytes, now: float) -> bool:
        """Leave a heartbeat; return whether the agent has taken the one before, and so will take this one."""
        if len(data) > _MAX_BYTES:
            return False
        is_taken = 0 < self._number == self._taken()
        self._number += 1
        _LEFT.pack_into(self._page, self._start, self._number, now, len(data), _checksum(self._number, now, data))
        self._page[self._start + _LEFT.size : self._start + _LEFT.size + len(data)] = data
        return is_taken

    def read(self) -> LeftBeat | None:
        """Return the newest heartbeat, if it is not taken yet and complete."""
        number, at, length, checksum = _LEFT.unpack_from(self._page, self._start)
        if number == self._taken() or length > _MAX_BYTES:
            return None
        data = self._page[self._start + _LEFT.size : self._start + _LEFT.size + length]
        return LeftBeat(number, at, data) if _checksum(number, at, data) == checksum else None

    def take(self, left: LeftBeat) -> None:
        """Note that the head is told of this heartbeat."""
        _TAKEN.pack_into(self._page, self._start + _TAKEN_AT, left.number)

    def note_step(self, step: int) -> None:
        """Note, on the worker's side, that a step is done."""
        with contextlib.suppress(ValueError):  # it is closed
            _DONE.pack_into(self._page, self._start + _DONE_AT, step + 1)

    @property
    def step(self) -> int:
        """The step that the worker has done last; -1: none."""
        return int(_DONE.unpack_from(self._page, self._start + _DONE_AT)[0]) - 1

    def clear(self) -> None:
        """Prepare the slot for another worker."""
        self._page[self._start : self._start + SLOT_BYTES] = bytes(SLOT_BYTES)

    def close(self) -> None:
        """Give back the memory, on the worker's side."""
        self._page.close()

    def _taken(self) -> int:
        return int(_TAKEN.unpack_from(self._page, self._start + _TAKEN_AT)[0])


class BeatPage:
    """The slots of a machine, made by its agent."""

    def __init__(self) -> None:
        self._memory = Memory("unisono-beats", bytes(NUM_SLOTS * SLOT_BYTES))
        self._page = mmap.mmap(self._memory.descriptor, NUM_SLOTS * SLOT_BYTES)

    @property
    def path(self) -> str:
        """Path of the memory, for `open_slot`."""
        return self._memory.path

    def slot(self, index: int) -> BeatSlot | None:
        """Return a slot; None: there are not so many."""
        return BeatSlot(self._page, index) if index < NUM_SLOTS else None

    def close(self) -> None:
        self._page.close()
        self._memory.close()


def open_slot(path: str, index: int) -> BeatSlot | None:
    """Open a worker's slot; None where it cannot be reached: the worker then speaks for itself."""
    if not path or index >= NUM_SLOTS:
        return None
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            return BeatSlot(mmap.mmap(descriptor, NUM_SLOTS * SLOT_BYTES), index)
        finally:
            os.close(descriptor)
    return None


def _checksum(number: int, at: float, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(_LEFT.pack(number, at, len(data), 0)))
