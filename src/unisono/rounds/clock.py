"""Where the wall time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.telemetry import PARTS

__all__ = ["Clock"]


@dataclass
class Clock:
    """The seconds of each part of a step. One part at a time, so they add up to the whole."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    last: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """The parts of the step before."""
    on_switch: Callable[[str], None] | None = None
    """Is told the part that begins, while a profile marks them."""
    _now: str = "other"
    _since: float = field(default_factory=time.perf_counter)

    def switch(self, part: str) -> None:
        """Count the time from now on as ``part``."""
        now = time.perf_counter()
        self.parts[self._now] += now - self._since
        self._now, self._since = part, now
        if self.on_switch is not None:
            self.on_switch(part)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count so much of ``source`` as ``target`` instead."""
        seconds = min(seconds, self.parts[source])
        self.parts[source] -= seconds
        self.parts[target] += seconds

    def reset(self) -> dict[str, float]:
        """Return the parts since the last reset."""
        self.switch(self._now)
        self.last, self.parts = self.parts, dict.fromkeys(PARTS, 0.0)
        return self.last
