"""Printing in a thread: the reader of a pipe may stand still, and an event loop must not."""

from __future__ import annotations

import math
import os
import queue
import sys
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from unisono.system.threads import NamedThread

__all__ = ["Aside"]

T = TypeVar("T")

STILL_S: Final = 0.5
"""What has taken one item for longer than this stands still."""
HURRY_S: Final = 2.0
MANY: Final = 1_000
MOST: Final = 200_000


class Aside(Generic[T]):
    """Gives items to a function in a thread, in their order.

    Where more come than it takes, `put` waits until there are fewer; but not for a function that stands still. Then
    the items wait here, `MOST` at most: those that come when so many wait are dropped.
    """

    def __init__(self, take: Callable[[T], object]) -> None:
        self._take = take
        self._items: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._began_at: float | None = None  # with the item that the function has now
        # A program waits for the reader of a pipe, but not for a person at a terminal.
        self._patience_s = HURRY_S if sys.stderr is not None and sys.stderr.isatty() else math.inf
        self._thread = NamedThread(self._work, "unisono-aside")
        self._thread.start()

    def put(self, item: T) -> None:
        while self._items.qsize() >= MANY and not self._stands_still(STILL_S):
            time.sleep(0.001)
        if self._items.qsize() < MOST:
            self._items.put((item,))

    def hurry(self) -> None:
        """Have `close` not wait for a function that stands still."""
        self._patience_s = HURRY_S

    def close(self) -> None:
        """Wait until the function has taken all items."""
        self._items.put(None)
        while self._thread.is_alive() and not self._stands_still(self._patience_s):
            self._thread.join(0.05)
        if self._thread.is_alive():  # it has the lock of a stream, for which the interpreter would wait at its end
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process

    def _stands_still(self, seconds: float) -> bool:
        began_at = self._began_at
        return began_at is not None and time.monotonic() - began_at > seconds

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            self._began_at = time.monotonic()
            self._take(item[0])
            self._began_at = None
