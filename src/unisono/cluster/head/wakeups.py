"""When the membership has to be looked at again, and whether this process has stood still."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

__all__ = ["DeadlineTimer"]

CATCH_UP_BEATS: Final = 2
"""A head that stood still waits for so many heartbeats before it calls a worker silent."""


class DeadlineTimer:
    """A timer for the next deadline of the membership.

    Args:
        heartbeat_s: a timer that is so much late shows that this process stood still.
        ring: is called when the deadline has come.
    """

    def __init__(self, heartbeat_s: float, ring: Callable[[], None]) -> None:
        self._heartbeat_s = heartbeat_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._due = math.inf
        self._listens_until = 0.0

    def look(self) -> float:
        """Return the time. Notes when this process has stood still: messages have arrived that are not read yet."""
        now = time.monotonic()
        if now > self._due + self._heartbeat_s:
            self._listens_until = now + CATCH_UP_BEATS * self._heartbeat_s
        return now

    def listens(self, now: float) -> bool:
        """Return whether nobody is to be called silent yet."""
        return now < self._listens_until

    def set(self, deadline: float | None) -> None:
        """Ring at this time; None: never."""
        now = time.monotonic()
        if self._timer is not None:
            if deadline == self._deadline and now <= self._due:
                return
            self._timer.cancel()
            self._timer = None
        self._due, self._deadline = math.inf, deadline
        if deadline is not None:
            self._due = max(now, deadline, self._listens_until)
            self._timer = asyncio.get_running_loop().call_later(self._due - now, self._strike)

    def _strike(self) -> None:
        self._timer = None
        self._ring()
