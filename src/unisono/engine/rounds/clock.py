"""Where the wall time of a step goes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from unisono.core.telemetry import PARTS, UNKNOWN, StepTimes, in_microseconds
from unisono.core.waits import NOBODY, Wait

__all__ = ["Clock"]


@dataclass
class Clock:
    """The seconds of each part of a step. One part at a time, so they add up to the whole."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    last: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """The parts of the step before."""
    times: StepTimes = UNKNOWN
    """What else is known of the step before."""
    generation: int = 0
    """In which ``times`` has its ranks."""
    _waits: dict[int, float] = field(default_factory=dict)
    """By rank, how long each was waited for."""
    _waited_in: int = 0
    _faults: int = field(default_factory=lambda: _page_faults())
    on_switch: Callable[[str], None] | None = None
    """Is told the part that begins, while a profile marks them."""
    _now: str = "other"
    _since: float = field(default_factory=lambda: time.perf_counter())

    def switch(self, part: str) -> float:
        """Count the time from now on as ``part``; return how long it was another one, since the last call."""
        now = time.perf_counter()
        seconds = now - self._since
        self.parts[self._now] += seconds
        self._now, self._since = part, now
        if self.on_switch is not None:
            self.on_switch(part)
        return seconds

    @contextmanager
    def other(self) -> Iterator[None]:
        """Return a context whose time is no part of what the script does by itself."""
        part = self._now
        self.switch("other")
        try:
            yield
        finally:
            self.switch(part)

    def note(self, wait: Wait, network_s: float, generation: int) -> None:
        """Count parts of an exchange that is over as waiting and network.

        Args:
            generation: in which the wait has its rank.
        """
        self._move(wait.seconds, "waiting")
        self._move(network_s, "network")
        if generation != self._waited_in:
            self._waits, self._waited_in = {}, generation
        if wait.rank != NOBODY:
            self._waits[wait.rank] = self._waits.get(wait.rank, 0.0) + wait.seconds

    def _move(self, seconds: float, target: str) -> None:
        seconds = min(seconds, self.parts["exchange"])
        self.parts["exchange"] -= seconds
        self.parts[target] += seconds

    def reset(self) -> dict[str, float]:
        """Return the parts since the last reset, in whole microseconds."""
        self.switch(self._now)
        faults = _page_faults()
        waits_for = max(self._waits, key=self._waits.__getitem__, default=NOBODY)
        self.times = StepTimes(waits_for, in_microseconds(self._waits.get(waits_for, 0.0)), faults - self._faults)
        self.generation, self._waits, self._faults = self._waited_in, {}, faults
        self.last = {part: in_microseconds(seconds) for part, seconds in self.parts.items()}
        self.parts = dict.fromkeys(PARTS, 0.0)
        return self.last


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
