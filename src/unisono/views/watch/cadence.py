"""Cadence of progress lines in a log: often at first, then rarer and rarer, so a run of days does not fill a disk."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["WAITS_S", "Cadence"]

WAITS_S: Final = (1, 2, 2, 5, 10, 10, 30, 60, 60, 120, 300, 600)
"""Seconds between two lines; the last of them from then on. A day has about 150 lines."""


class Cadence:
    """Says when the next line is due."""

    def __init__(self) -> None:
        self._due = -math.inf
        self._num_lines = 0

    def is_due(self, now: float) -> bool:
        """Return whether a line is due."""
        return now >= self._due

    def said(self, now: float) -> None:
        """Note that a line was written because it was due."""
        self._due = now + WAITS_S[min(self._num_lines, len(WAITS_S) - 1)]
        self._num_lines += 1
