"""Where the wall time of a step goes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from unisono.exchange.spent import NOTHING, Spent
from unisono.telemetry import PARTS, UNKNOWN, StepTimes

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
    _spent: Spent = NOTHING
    _spent_in: int = 0
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

    def note(self, spent: Spent, generation: int) -> None:
        """Count the waits of an exchange that is over as waiting and network.

        Args:
            generation: in which ``spent`` has its ranks.
        """
        self._move(spent.waiting_s, "waiting")
        self._move(spent.network_s, "network")
        self._spent = spent if generation != self._spent_in else self._spent.plus(spent)
        self._spent_in = generation

    def _move(self, seconds: float, target: str) -> None:
        seconds = min(seconds, self.parts["exchange"])
        self.parts["exchange"] -= seconds
        self.parts[target] += seconds

    def reset(self) -> dict[str, float]:
        """Return the parts since the last reset."""
        self.switch(self._now)
        faults = _page_faults()
        self.times = _times(self._spent, faults - self._faults)
        self.generation, self._spent, self._faults = self._spent_in, NOTHING, faults
        self.last, self.parts = self.parts, dict.fromkeys(PARTS, 0.0)
        return self.last


def _times(spent: Spent, page_faults: int) -> StepTimes:
    waits_for, waits_s = spent.longest_wait()
    link_to, carried = spent.busiest_link()
    return StepTimes(
        waits_for=waits_for,
        waits_s=waits_s,
        link_to=link_to,
        link_s=carried.busy_s,
        link_bytes=carried.nbytes,
        overlap_s=spent.overlap_s,
        page_faults=page_faults,
    )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
