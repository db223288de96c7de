"""By how much the clocks of two machines differ, from meetings: moments that no member leaves before all have come."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Meeting", "offset"]

Meeting = tuple[float, float]
"""When a member came to a meeting and when it left, by its own clock, in seconds."""


def offset(own: Sequence[Meeting], other: Sequence[Meeting]) -> tuple[float, float]:
    """Return by how many seconds the other's clock is ahead, and by how many that may be wrong, at most.

    Nobody leaves a meeting before everybody has come. So each meeting gives two bounds: what the other's clock said
    when it left is not before what this one's said when it came, plus the offset; and the other way round. The
    narrowest bounds of all meetings count; the offset is in their middle.

    Args:
        own: the same meetings, in the same order, as ``other``; at least one.
    """
    lowest, highest = float("-inf"), float("inf")
    for (came, left), (other_came, other_left) in zip(own, other, strict=True):
        lowest = max(lowest, other_came - left)
        highest = min(highest, other_left - came)
    return (lowest + highest) / 2, abs(highest - lowest) / 2
