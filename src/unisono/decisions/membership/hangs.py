"""Is a worker late, or does it hang? From its heartbeats, and from who waits for it.

A worker is only late where others wait for it: a slow team has no one to blame. Members that hold the run's state can
go on without it, so they do (it is left aside, and ended later). Newcomers that are being admitted wait as well, but
between two steps a script may do for long what it likes, and all members at once; so their waiting counts within a
micro-batch only, and with much more patience: there may be nobody who could go on.

Members at the end of the run have nothing to go on with either. What the last one does there (an export of the main
worker) may be slow; it is reported, and when it takes very long the run ends, and not well.

One that stands where another has hung before (the same micro-batch, the same samples) needs nobody who waits: there it
is the script or its data, which hangs on every worker, and the run ends.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from unisono.messages import Beat

__all__ = ["FIRST_STEP", "Hang", "Limits", "Verdict", "Waiting", "judge"]

FIRST_STEP: Final = 10
"""So many times longer may the first step of a worker take before it counts as hanging; and a micro-batch that only
newcomers wait for; and what is done after the training loop."""


class Waiting(enum.Enum):
    """Who waits for a worker."""

    NOBODY = "nobody"
    NEWCOMERS = "newcomers"
    FINISHERS = "finishers"
    """Members, all of them at the end of the run."""
    MEMBERS = "members"


class Verdict(enum.Enum):
    FINE = "fine"
    LATE = "late"
    """It is reported, with its stack."""
    ASIDE = "aside"
    """The others compute its micro-batches and go on."""
    HANGS = "hangs"
    """It is ended."""
    HANGS_AGAIN = "hangs again"
    """Where another has hung: the run ends."""
    HANGS_AT_END = "hangs at the end"
    """All others are at the end of the run: the run ends."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """In seconds without progress."""

    late_s: float
    aside_s: float
    hang_s: float

    @property
    def shortest_s(self) -> float:
        """Whoever makes progress within this is fine, whatever else is known."""
        return min(self.late_s, self.aside_s, self.hang_s)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Where a worker hung that the others went on without."""

    worker_id: str
    beat: Beat

    def is_at(self, beat: Beat) -> bool:
        """Whether a worker that says this stands at the same place."""
        return _place(self.beat) == _place(beat)

    def is_passed(self, beat: Beat) -> bool:
        """Whether a member that says this has got further."""
        return (beat.phase, beat.step) > (self.beat.phase, self.beat.step)


def judge(beat: Beat, waiting: Waiting, *, is_known: bool, limits: Limits) -> Verdict:
    """What to think of a worker that computes.

    Args:
        is_known: another worker has hung where this one stands.
    """
    seconds = beat.seconds_at
    late = Verdict.LATE if seconds > limits.late_s else Verdict.FINE
    if waiting is Waiting.FINISHERS:
        return Verdict.HANGS_AT_END if seconds > limits.hang_s * FIRST_STEP else late
    if is_known:
        return Verdict.HANGS_AGAIN if seconds > limits.hang_s else late
    only_newcomers = waiting is Waiting.NEWCOMERS
    if waiting is Waiting.NOBODY or (only_newcomers and beat.microbatch < 0):
        return Verdict.FINE
    # The first step of its life may load and compile for a long time, on every worker.
    is_first = beat.num_steps <= 1
    if seconds > limits.hang_s * (FIRST_STEP if is_first or only_newcomers else 1):
        return Verdict.HANGS
    if seconds > limits.aside_s and not is_first and not only_newcomers:
        return Verdict.ASIDE
    return late


def _place(beat: Beat) -> tuple[int, int, int, bool]:
    return beat.phase, beat.step, beat.microbatch, beat.evaluates
