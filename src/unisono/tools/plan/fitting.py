"""Sizes of a micro-batch: which one to try next, which fit, and which is fastest.

A size is tried by training some steps with it. No size is tried that would need more than `SPARE` of the memory, by
what the sizes before it have needed: activations grow with the samples, or a little faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["SPARE", "Tried", "expected_peak", "fastest", "largest", "next_size", "sizes_for"]

SPARE: Final = 0.8
"""Of the memory, what a size may be expected to need and still be tried."""
STEEPER: Final = 1.1
"""Memory may grow faster than the samples by this factor."""
RISES: Final = 1.03
"""Larger micro-batches are tried for speed as long as twice the samples bring so much more of them a second."""
FALLS: Final = 0.85
"""Smaller ones, as long as they have this part of the best rate."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of a size."""

    size: int
    """Samples of a micro-batch."""
    seconds: float
    """For one; infinity: there was not enough memory."""
    peak: int
    """Bytes that the process had at most."""

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.size / self.seconds


def sizes_for(batch_size: int, start: int, most: int) -> list[int]:
    """Return sizes about a factor of 2 apart that divide a batch, ascending; the present one is among them."""
    divisors = [number for number in range(1, most + 1) if batch_size % number == 0]
    found = [start]
    for step in (0.5, 2.0):
        at = start
        while (wanted := at * step) >= 1 and wanted <= most:
            at = min(divisors, key=lambda number: (abs(math.log(number / wanted)), number))
            if at in found:
                break
            found.append(at)
    return sorted(found)


def expected_peak(tried: Sequence[Tried], fixed: int, size: int) -> float:
    """Return how many bytes a larger size will need at most.

    Args:
        fixed: bytes that do not depend on the size.
    """
    known = sorted((one for one in tried if one.fits), key=lambda one: one.size)
    last = known[-1]
    if len(known) == 1 or known[-2].peak >= last.peak:
        return fixed + max(0, last.peak - fixed) * size / last.size
    slope = (last.peak - known[-2].peak) / (last.size - known[-2].size)
    return last.peak + STEEPER * slope * (size - last.size)


def next_size(
    tried: Sequence[Tried], sizes: Sequence[int], *, fixed: int, limit: int | None, to_the_limit: bool
) -> int | None:
    """Return which size to try next; None: enough is known.

    Args:
        tried: at least the present size.
        sizes: that there are, ascending.
        limit: bytes that a process could have; None: unknown, and a size that does not fit is found by trying.
        to_the_limit: the largest size that fits is wanted, also if it is no faster.
    """
    known = sorted(tried, key=lambda one: one.size)
    above = [size for size in sizes if size > known[-1].size]
    if above and known[-1].fits and (limit is None or expected_peak(known, fixed, above[0]) <= SPARE * limit):
        rises = len(known) < 2 or known[-1].rate >= RISES * known[-2].rate
        if to_the_limit or rises:
            return above[0]
    below = [size for size in sizes if size < known[0].size]
    fitting = [one for one in known if one.fits]
    if below and (not fitting or known[0].rate >= FALLS * max(one.rate for one in fitting)):
        return below[-1]
    return None


def largest(tried: Sequence[Tried]) -> Tried | None:
    """Return the largest size that fits."""
    return max((one for one in tried if one.fits), key=lambda one: one.size, default=None)


def fastest(tried: Sequence[Tried]) -> Tried | None:
    """Return the size with the most samples a second, of one worker."""
    return max((one for one in tried if one.fits), key=lambda one: one.rate, default=None)
