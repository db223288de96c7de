"""A run as people and their tools see it: functions of the record."""

from __future__ import annotations

import time

__all__ = ["date"]


def date(seconds: float) -> str:
    """Return ``2026-03-01 17:02:59``, on the clocks of this place; ``unknown`` for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "unknown"
