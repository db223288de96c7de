"""Interruptions: how much longer a step took because there was another generation."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from unisono.core.events import Interruption, MembershipChanged, StepFinished

__all__ = ["Interruptions"]

USUAL: Final = 15
"""The usual time of a step is the median of so many before it."""


class Interruptions:
    """Measures interruptions from the times of steps, in the head while they happen, or afterwards from the files.

    Steps may be told later than the generations that have come after them.

    Args:
        last: when the last step was finished, in seconds since 1970; 0: unknown.
        usual_s: the usual time of a step; 0: unknown.
    """

    def __init__(self, last: float = 0.0, usual_s: float = 0.0) -> None:
        self._last = last
        self._times: deque[float] = deque([usual_s] if usual_s else (), USUAL)
        self._changes: list[MembershipChanged] = []  # of whose generation no step is known
        self._is_first = not last

    @property
    def last(self) -> float:
        """When the last step was finished; 0: unknown."""
        return self._last

    @property
    def usual_s(self) -> float:
        """The usual time of a step; 0: unknown."""
        return statistics.median(self._times) if self._times else 0.0

    def begin(self) -> None:
        """Note that the run begins, or begins again."""
        self._last, self._is_first = 0.0, True

    def change(self, event: MembershipChanged) -> None:
        """Note that another generation has begun. Several before the next step are one interruption."""
        self._changes.append(event)

    def step(self, event: StepFinished) -> Interruption | None:
        """Count a finished step; return the interruption that is over with it."""
        if not event.time:
            return None
        took = event.time - self._last if self._last else event.seconds.total()
        self._last = event.time
        over = [change for change in self._changes if change.generation <= event.generation]
        self._changes = self._changes[len(over) :]
        is_first, self._is_first = self._is_first, False
        if is_first:  # its generation is that of the beginning
            return None
        if not over:
            self._times.append(took)
            return None
        return Interruption(
            time=event.time,
            generation=over[-1].generation,
            step=event.step,
            seconds=round(max(0.0, took - self.usual_s), 6),
            reason="; ".join(dict.fromkeys(change.reason for change in over if change.reason)),
        )
