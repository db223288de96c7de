"""Usefulness: which part of the workers' time was spent on computing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from unisono.events import StepFinished

__all__ = ["Usefulness", "useful_share"]

SAMPLE_S: Final = 1.0


class Usefulness:
    """Sums the times of all workers, of a step in every second.

    Args:
        useful_s: what was summed before: time of computing.
        total_s: ... and the whole time.
    """

    def __init__(self, useful_s: float = 0.0, total_s: float = 0.0) -> None:
        self.useful_s = useful_s
        self.total_s = total_s
        self._at = 0.0

    @property
    def share(self) -> float | None:
        """The part, 0 to 1; None: nothing is known yet."""
        return _share(self.useful_s, self.total_s)

    def add(self, step: StepFinished) -> None:
        """Count a step, unless another one was counted a moment before."""
        if step.time < self._at + SAMPLE_S:
            return
        self._at = step.time
        for times in step.workers.values():
            self.useful_s += times.last.compute
            self.total_s += times.last.total()


def useful_share(workers: Iterable[Mapping[str, float]]) -> float | None:
    """Return the part of the workers' time that was spent on computing, 0 to 1; None: no time is known.

    Args:
        workers: of each, the seconds of its steps, by the names of `unisono.events.Seconds`.
    """
    known = list(workers)
    return _share(sum(each["compute"] for each in known), sum(sum(each.values()) for each in known))


def _share(useful_s: float, total_s: float) -> float | None:
    return round(useful_s / total_s, 4) if total_s > 0 else None
