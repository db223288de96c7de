"""Number of workers by efficiency: grow while the next worker is worth it, and give workers back that are not.

The **unit** is the rate (samples a second) of one worker at the smallest size that was measured. The efficiency of the
workers between two sizes is what they have added to the rate, divided by what they would add at the unit each::

    efficiency(a -> b) = (rate(b) - rate(a)) / ((b - a) * rate(smallest) / smallest)

It is that of the *next* workers and not of all: eight workers can reach 70% together while the eighth adds nothing.

A size is measured by the median of `SETTLED` steps, after `SKIPPED` steps at that size. What was measured is
remembered, so the number does not oscillate: a size that was not worth it is not tried again for `RETRY_STEPS` steps,
and a worker is only given back when it is `SLACK` below the limit. Of several that are not worth it together, half are
given back first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

import msgspec

from unisono.core.words import count

__all__ = ["RETRY_STEPS", "SETTLED", "SKIPPED", "SLACK", "Bounds", "Measured", "SizeChange"]

SKIPPED: Final = 5
SETTLED: Final = 20
SLACK: Final = 0.1
RETRY_STEPS: Final = 2_000


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    least: int
    most: int
    """What the command line allows, and the machines have room for."""
    efficiency: float
    """The next worker is worth it if it adds this part of the unit."""
    noun: str = "worker"
    """What is counted: workers, or groups of them."""


class SizeChange(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    why: str


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured so far: a value, changed by every step."""

    rates: Mapping[int, float] = {}
    """Samples a second, by number of workers."""
    refused: Mapping[int, int] = {}
    """Number of workers that was not worth it -> the step in which that was found."""
    samples: int = 0
    """Most samples of a step. With another batch size everything is measured anew."""
    size: int = 0
    num_skipped: int = 0
    window: tuple[float, ...] = ()
    """Samples a second of the last steps at this size."""

    def after(self, size: int, samples: int, seconds: float) -> Measured:
        """Return what is known after a step by so many workers."""
        if size != self.size:
            return msgspec.structs.replace(self, size=size, num_skipped=1, window=())
        if self.num_skipped < SKIPPED:
            return msgspec.structs.replace(self, num_skipped=self.num_skipped + 1)
        if samples > self.samples:
            return Measured(samples=samples, size=size, num_skipped=SKIPPED, window=(samples / seconds,))
        window = (*self.window, samples / seconds)
        if len(window) < SETTLED:
            return msgspec.structs.replace(self, window=window)
        rates = {**self.rates, size: statistics.median(window)}
        return msgspec.structs.replace(self, rates=rates, window=())

    @property
    def is_settled(self) -> bool:
        """Return whether the last step has completed a measurement."""
        return self.num_skipped >= SKIPPED and not self.window and self.size in self.rates

    def efficiency(self, size: int) -> float | None:
        """Return the efficiency of the workers between the next smaller size that was measured and this one."""
        smaller = self._smaller(size)
        if smaller is None:
            return None
        first = min(self.rates)
        return (self.rates[size] - self.rates[smaller]) / ((size - smaller) * self.rates[first] / first)

    def decide(self, step: int, bounds: Bounds) -> tuple[Measured, SizeChange | None]:
        """Return which number of workers the run is to have from now on; None: the present one."""
        if not self.is_settled:
            return self, None
        refused = {size: at for size, at in self.refused.items() if step - at < RETRY_STEPS}
        known = msgspec.structs.replace(self, refused=refused)
        found, smaller = known.efficiency(self.size), known._smaller(self.size)
        why = "to measure what one more adds"
        if found is not None and smaller is not None:
            number = self.size - smaller
            why = f"the last {count(number, bounds.noun)} of {self.size} {_adds(number, found)}"
            if found < (bounds.efficiency - SLACK if number == 1 else bounds.efficiency):
                known = msgspec.structs.replace(known, refused={**refused, self.size: step})
                target = max(bounds.least, (smaller + self.size) // 2)
                return known, SizeChange(size=target, why=why) if target < self.size else None
            if found < bounds.efficiency:
                return known, None
        target = known._next(bounds)
        return known, SizeChange(size=target, why=why) if target > self.size else None

    def _smaller(self, size: int) -> int | None:
        return max((known for known in self.rates if known < size), default=None)

    def _next(self, bounds: Bounds) -> int:
        """Return the size to try: half as many again, or halfway to one that was not worth it."""
        ceiling = min((size for size in self.refused if size > self.size), default=None)
        target = self.size + max(1, self.size // 2)
        if ceiling is not None and target >= ceiling:
            target = (self.size + ceiling) // 2
        return min(target, bounds.most)


def _adds(number: int, efficiency: float) -> str:
    each = "adds" if number == 1 else "add, each,"
    return f"{each} {efficiency:.0%} of what one adds at first"
