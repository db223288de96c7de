"""Verdict on a worker: fine, late, or hanging, by its heartbeats and by the workers that wait for it.

A worker is only late where others wait for it: in a team that is slow together no worker is to blame. Members that hold
the run's state can go on without the late one, so they do (it is left aside, and ended later). Newcomers that are being
admitted wait as well; but between two steps a script may be busy for long, on all members at once, so their waiting
counts within a micro-batch only, and with much more patience: perhaps no other worker could go on.

Members at the end of the run have nothing to go on with either. The last one may be busy there for long (an export of
the main worker); it is reported, and after a very long time the run ends as failed.

A worker at the position where another one has hung before (the same micro-batch, the same samples) is judged even if no
worker waits: the script or its data hangs there on every worker, so the run ends.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from unisono.core.messages import Beat

__all__ = ["FIRST_STEP", "BegunRound", "Hang", "Lateness", "Limits", "Waiting", "judge"]

FIRST_STEP: Final = 10
"""Factor of patience: for the first step of a worker, for a micro-batch that only newcomers wait for, and for the work
after the training loop."""


class Waiting(enum.Enum):
    """The workers that wait for a worker."""

    NOBODY = "nobody"
    NEWCOMERS = "newcomers"
    FINISHERS = "finishers"
    """Members, all of them at the end of the run."""
    MEMBERS = "members"


class Lateness(enum.Enum):
    FINE = "fine"
    LATE = "late"
    """The worker is reported, with its stack."""
    ASIDE = "aside"
    """The others compute its micro-batches and go on."""
    HANGS = "hangs"
    """The worker is ended."""
    HANGS_AGAIN = "hangs again"
    """Another worker has hung there: the run ends."""
    HANGS_AT_END = "hangs at the end"
    """All others are at the end of the run: the run ends."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds without progress."""

    late_s: float
    aside_s: float
    hang_s: float

    @property
    def shortest_s(self) -> float:
        """A worker that makes progress within this time is fine, whatever else is known."""
        return min(self.late_s, self.aside_s, self.hang_s)


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """The position at which a worker hung; the others went on without it."""

    worker_id: str
    beat: Beat

    def is_at(self, beat: Beat) -> bool:
        """Return whether a worker with this heartbeat stands at the same position."""
        return _position(self.beat) == _position(beat)

    def is_passed(self, beat: Beat) -> bool:
        """Return whether a member with this heartbeat has got further."""
        return (beat.phase, beat.step) > (self.beat.phase, self.beat.step)


def judge(beat: Beat, waiting: Waiting, *, is_known: bool, limits: Limits) -> Lateness:
    """Judge a worker that computes.

    Args:
        is_known: another worker has hung at the same position.
    """
    seconds = beat.seconds_at
    late = Lateness.LATE if seconds > limits.late_s else Lateness.FINE
    if waiting is Waiting.FINISHERS:
        return Lateness.HANGS_AT_END if seconds > limits.hang_s * FIRST_STEP else late
    if is_known:
        return Lateness.HANGS_AGAIN if seconds > limits.hang_s else late
    only_newcomers = waiting is Waiting.NEWCOMERS
    if waiting is Waiting.NOBODY or (only_newcomers and beat.microbatch < 0):
        return Lateness.FINE
    # The first step of its life may load and compile for a long time, on every worker.
    is_first = beat.num_steps <= 1
    if seconds > limits.hang_s * (FIRST_STEP if is_first or only_newcomers else 1):
        return Lateness.HANGS
    if seconds > limits.aside_s and not is_first and not only_newcomers:
        return Lateness.ASIDE
    return late


def _position(beat: Beat) -> tuple[int, int, int, bool]:
    return beat.phase, beat.step, beat.microbatch, beat.evaluates


class BegunRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round in which a member was seen to wait for the others for a while.

    Two members that wait in different rounds of the same number never meet.
    """

    worker_id: str
    generation: int
    number: int
    title: str

    @staticmethod
    def of(worker_id: str, beat: Beat) -> BegunRound | None:
        """Return the round that a heartbeat names; None if it names none."""
        if beat.round < 0:
            return None
        return BegunRound(worker_id=worker_id, generation=beat.generation, number=beat.round, title=beat.title)

    def is_of(self, beat: Beat | None) -> bool:
        """Return whether a worker with this heartbeat waits in this round."""
        return beat is not None and self._is_at(beat) and beat.title == self.title

    def differs_from(self, beat: Beat) -> bool:
        """Return whether a worker with this heartbeat waits in another round of the same number."""
        return self._is_at(beat) and beat.title != self.title

    def _is_at(self, beat: Beat) -> bool:
        return (beat.generation, beat.round) == (self.generation, self.number)
