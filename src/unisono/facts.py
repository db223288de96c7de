"""What each member tells all others with every combine: numbers that travel with the sums, at no extra trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NOT_COMPARED", "PARTS", "Facts", "halves"]

NOT_COMPARED = -1.0
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
    arithmetic: float = 0.0
    """A fingerprint of what the member's arithmetic depends on; with another one, other bits are to be expected."""
    compared: float = NOT_COMPARED
    """The number of the step, of the whole run, before which the member has taken a digest of its state."""
    state_high: float = 0.0
    state_low: float = 0.0
    """That digest: 64 bits are more than a float64 holds."""
    own_leaf: float = NOT_COMPARED
    """A micro-batch that this member has computed and another member has computed as well."""
    own_high: float = 0.0
    own_low: float = 0.0
    """The digest of its gradient."""
    other_leaf: float = NOT_COMPARED
    """A micro-batch of another member that this one has computed as well."""
    other_high: float = 0.0
    other_low: float = 0.0
    checkpoint: float = 0.0
    """From here on: what it says about checkpoints (`unisono.decisions.cadence.CheckpointReport`)."""
    checkpoint_step: float = 0.0
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


def halves(digest: int) -> tuple[float, float]:
    """Return the upper and the lower 32 bits of a 64-bit digest, each exact as a float64."""
    return float(digest >> 32), float(digest & 0xFFFFFFFF)


_WORD = Facts._fields.index("checkpoint")
