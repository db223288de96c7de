"""For whom a member has waited in a combine.

Each member tells with its sums when it was **ready**: it had computed all that it brings. There is no clock that all
machines share, and none is needed: the moment is told in seconds since the commit before, which all members have seen
at the same time, but for the time that a message takes. Nothing can be summed before the last member is ready. So a
member has waited from its own moment until that of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["NOBODY", "NO_WAIT", "UNTOLD", "Wait", "wait_of"]

NOBODY: Final = -1
"""A rank of no member."""
UNTOLD: Final = -1.0
"""Stands for the moment of a member that has seen no commit yet of which the others know."""


class Wait(NamedTuple):
    """A wait that is over."""

    rank: int
    """The member that was waited for."""
    seconds: float


NO_WAIT: Final = Wait(NOBODY, 0.0)


def wait_of(rank: int, ready: Sequence[float]) -> Wait:
    """Return how long a member has waited, and for whom.

    Args:
        rank: the member.
        ready: by rank, seconds from the moment that all share until each member was ready; or `UNTOLD`.
    """
    last = max(range(len(ready)), key=ready.__getitem__)
    if ready[rank] == UNTOLD or ready[last] <= ready[rank]:
        return NO_WAIT
    return Wait(last, ready[last] - ready[rank])
