"""Plain lines about a run that is looked at, for files and pipes: what happens, and now and then where it stands."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

from unisono.overview import Overview, Recent
from unisono.watch.terminal.drawing import in_short
from unisono.watch.terminal.text import plain, time_of_day
from unisono.words import harmless

__all__ = ["Lines"]

EVERY_S: Final = 30.0
_KNOWN: Final = 200


class Lines:
    """Writes each sentence once, and the state at most every `EVERY_S`.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, out: TextIO | None = None, now: Callable[[], float] = time.time) -> None:
        self._out = sys.stdout if out is None else out
        self._now = now
        self._known: deque[Recent] = deque(maxlen=_KNOWN)
        self._told_at = 0.0
        self._state = ("", -1)
        self._note = ""

    def take(self, overview: Overview) -> None:
        """Write what is new."""
        for each in overview.recent:
            if each not in self._known:
                self._known.append(each)
                self._write(each.time or self._now(), each.text)
        state = (overview.state, overview.step)
        if state[0] != self._state[0] or (state != self._state and self._now() - self._told_at >= EVERY_S):
            self._tell(overview)

    def note(self, text: str) -> None:
        """Write a sentence about the view, unless it was the last one."""
        begins = text.partition(";")[0]
        if begins != self._note:
            self._note = begins
            self._write(self._now(), text)

    def close(self, overview: Overview) -> None:
        """Write how the run stands at the end."""
        if (overview.state, overview.step) != self._state:
            self._tell(overview)

    def _tell(self, overview: Overview) -> None:
        self._state, self._told_at = (overview.state, overview.step), self._now()
        self._write(self._now(), plain([in_short(overview)]) + (f"  ({overview.reason})" if overview.reason else ""))

    def _write(self, at: float, text: str) -> None:
        self._out.write(f"{time_of_day(at)}  {harmless(text.partition(chr(10))[0])}\n")
        self._out.flush()
