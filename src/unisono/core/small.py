"""Micro-batches that are too small to keep a worker busy: what the run's own work for each costs. Without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MATTERS_S", "OwnWork"]

WARM_UP: Final = 16
"""So many micro-batches at the beginning do not count: caches, compilation, page faults."""
TOO_MUCH: Final = 0.10
"""Own work is told where it takes more than this part of the script's time for a micro-batch. The time of the script
has grown by then as well: most of it passes between the operations of torch, and not in them."""
LITTLE: Final = 0.05
"""Micro-batches for which own work takes this part are large enough."""
MATTERS_S: Final = 2.0
"""And where it has taken so many seconds together."""


@dataclass
class OwnWork:
    """Time of the run's own work between micro-batches (random numbers, sums, guards), beside that of the script."""

    own_s: float = 0.0
    script_s: float = 0.0
    number: int = 0
    _is_told: bool = False

    def note(self, own_s: float, script_s: float) -> None:
        """Note a micro-batch."""
        self.number += 1
        if self.number > WARM_UP:
            self.own_s += own_s
            self.script_s += script_s

    def advice(self, microbatches: int, workers: int) -> str:
        """Return in words, once, that micro-batches are too small, and how many would not be; "" where they are not.

        The number is a multiple of the number of workers: the largest one below `microbatches` with which own work
        takes less than `LITTLE`, or the number of workers.
        """
        if self._is_told or self.own_s < MATTERS_S or self.own_s <= TOO_MUCH * self.script_s or microbatches <= workers:
            return ""
        self._is_told = True
        number = self.number - WARM_UP
        fitting = int(microbatches * LITTLE * self.script_s / self.own_s)
        better = max(fitting // workers, 1) * workers
        return (
            f"micro-batches are small: for each, Unisono's own work takes {1e3 * self.own_s / number:.2f} ms, beside "
            f"{1e3 * self.script_s / number:.2f} ms of the script ({self.own_s / self.script_s:.0%}). "
            f"microbatches={better} would take less time than {microbatches}, with different bits (docs/choosing_m.md)"
        )
