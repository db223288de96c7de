"""What each member tells all others with every combine: numbers that travel with the sums, at no extra trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PARTS", "Facts"]

PARTS = ("data", "compute", "exchange", "waiting", "other")
"""What the wall time of a step is spent on. ``waiting`` is for other members; together they are all of it."""


class Facts(NamedTuple):
    """Times in seconds. Those of the exchange of a step are known only after it, so they follow with the next one."""

    leaves: float = 0.0
    """Micro-batches that this member has computed for this step."""
    data: float = 0.0
    compute: float = 0.0
    last_data: float = 0.0
    """From here on: all parts of the step before."""
    last_compute: float = 0.0
    last_exchange: float = 0.0
    last_waiting: float = 0.0
    last_other: float = 0.0
    notice: float = 0.0
    """The newest planned generation that this member has heard of; 0: none."""
    first_of_host: float = 0.0
    """The first rank of those that this member shares memory with."""
    checkpoint: float = 0.0
    """From here on: what it says about checkpoints (`unisono.decisions.cadence.Word`)."""
    checkpoint_attempt: float = -1.0
    checkpoint_status: float = 0.0
    checkpoint_reaches: float = 0.0
    journal_lines: float = 0.0

    @property
    def last(self) -> dict[str, float]:
        """The parts of the step before, by name."""
        return dict(zip(PARTS, self[3:8], strict=True))

    def saying(self, word: Sequence[float]) -> Facts:
        """These, with that word about checkpoints."""
        return Facts(*self[:_WORD], *word)

    @property
    def word(self) -> tuple[float, ...]:
        """About checkpoints."""
        return self[_WORD:]


_WORD = Facts._fields.index("checkpoint")
