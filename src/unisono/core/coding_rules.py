"""Whether a member codes what it sends: whether a link saves more time on the bytes than the coder takes.

A member measures three things while it sends: how long its **link** takes for a byte, in the kernel's count of the time
in which data were under way; to which **share** of the bytes the coder brings the messages; and how long coding and
decoding of a byte take. Coding pays where ::

    link seconds per byte * (1 - share) > coder seconds per byte

as if nothing overlapped. Where there is a core to spare, the link carries one message while the next is coded, and more
would be gained than this counts; without one, nothing is lost.

Each member decides by itself, for what it sends, and says with every vote what it will do from then on. So all members
of a wire know how the messages of each come. Nobody codes while one member cannot decode. No bit depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

__all__ = ["CodingRule", "LinkUse", "Mode", "Word", "coding_members"]

DECAY: Final = 0.7
"""What a measurement counts for when the next one is there."""
MARGIN: Final = 1.25
"""A member begins to code where that saves so many times what it costs, and goes on while it saves anything."""
LEAST_BUSY_S: Final = 0.02
"""Less time on a link says nothing: the kernel counts in steps of some milliseconds."""
ROUND_TRIPS: Final = 3
"""Of a sum, in which a link is busy without carrying more: receives are announced, chunks and sums are acknowledged."""
SLOW_S: Final = 2e-9
"""Seconds for a byte: links below 4 Gbit/s. On others the coder is not even measured."""
TRIAL_VOTES: Final = 64
"""A coder that did not pay is measured again after so many votes: what is sent changes in the course of a training."""
ASSUMED: Final = (0.85, 2.5e-9)
"""Share and seconds of a coder that this member does not have."""


class Mode(IntEnum):
    """What the settings of a run say."""

    NEVER = 0
    AUTO = 1
    ALWAYS = 2


class Word(IntEnum):
    """What a member says with its vote."""

    CANNOT = 0
    """It has no coder, or shall have none."""
    PLAIN = 1
    """From now on it sends what lies in memory."""
    CODED = 2


class LinkUse(NamedTuple):
    """What a member has sent to one other between two votes, as the kernel counts."""

    nbytes: int
    busy_s: float
    """Time in which data were under way, and the receiver had room for them. It ends with the last acknowledgement,
    which a receiver may delay."""
    round_trip_s: float
    bytes_per_s: float
    """At which the kernel has seen data arrive in the end, where there were enough of them; 0: it has not."""

    @property
    def carrying_s(self) -> float:
        """How long the link needed for these bytes: what the kernel has counted, or seen, whichever is less."""
        if not self.bytes_per_s:
            return 0.0
        return max(0.0, min(self.busy_s - ROUND_TRIPS * self.round_trip_s, self.nbytes / self.bytes_per_s))


def coding_members(words: Sequence[int]) -> tuple[bool, ...]:
    """Return by rank whether a member's messages are coded from now on; equal on all that have heard the same words."""
    everyone_can = all(word in (Word.PLAIN, Word.CODED) for word in words)
    return tuple(everyone_can and word == Word.CODED for word in words)


class CodingRule:
    """One member's measurements on one wire, and what it decides by them. No I/O, no clock.

    Args:
        can_code: this member has the coder.
    """

    def __init__(self, mode: Mode, *, can_code: bool) -> None:
        self._mode = mode
        self._can_code = can_code and mode is not Mode.NEVER
        self._sent = self._busy_s = 0.0
        self._raw = self._coded = self._coding_s = 0.0
        self._opened = self._opening_s = 0.0
        self._votes_to_trial = 0
        self._is_on = False

    @property
    def wants_trial(self) -> bool:
        """Whether a message should be coded and decoded only to see what that costs and gives."""
        is_open = self._mode is Mode.AUTO and self._can_code and not self._is_on
        return is_open and not self._votes_to_trial and self._link_s > SLOW_S

    @property
    def _link_s(self) -> float:
        """Seconds of the link for a byte; 0: fast, or not known."""
        return self._busy_s / self._sent if self._sent and self._busy_s >= LEAST_BUSY_S else 0.0

    def note_link(self, uses: Sequence[LinkUse]) -> None:
        """Note what the links to some of the others have carried since the last vote.

        The links of a member are used at the same time, so the busiest of them counts for all their bytes.
        """
        self._sent = DECAY * self._sent + sum(use.nbytes for use in uses)
        self._busy_s = DECAY * self._busy_s + max((use.carrying_s for use in uses), default=0.0)

    def note_coded(self, raw: int, coded: int, seconds: float) -> None:
        """Note a message that was coded: bytes before and after, and the time of the processor."""
        self._raw, self._coded, self._coding_s = self._raw + raw, self._coded + coded, self._coding_s + seconds

    def note_decoded(self, raw: int, seconds: float) -> None:
        """Note a message that was decoded."""
        self._opened, self._opening_s = self._opened + raw, self._opening_s + seconds

    def pays(self) -> bool:
        """Return whether coding saves time, by what is known."""
        share, coder_s = ASSUMED
        if self._can_code:
            if not self._raw:
                return False
            share = self._coded / self._raw
            coder_s = self._coding_s / self._raw + (self._opening_s / self._opened if self._opened else 0.0)
        return self._link_s * (1 - share) > coder_s * (1.0 if self._is_on else MARGIN)

    def word(self) -> Word:
        """Decide, once for each vote, and return what this member says with it."""
        pays = self._link_s > 0.0 and self.pays()
        if self._raw and not self._votes_to_trial and not self._is_on and not pays:
            self._votes_to_trial = TRIAL_VOTES
            self._raw = self._coded = self._coding_s = self._opened = self._opening_s = 0.0
        elif self._votes_to_trial:
            self._votes_to_trial -= 1
        self._is_on = self._can_code and (self._mode is Mode.ALWAYS or pays)
        self._raw, self._coded, self._coding_s = (DECAY * one for one in (self._raw, self._coded, self._coding_s))
        self._opened, self._opening_s = DECAY * self._opened, DECAY * self._opening_s
        if not self._can_code:
            return Word.CANNOT
        return Word.CODED if self._is_on else Word.PLAIN

    def misses(self, words: Sequence[int]) -> list[int]:
        """Return the ranks of the members that have no coder, where that costs this member time; else []."""
        if self._mode is Mode.NEVER:
            return []
        is_wanted = self._is_on if self._can_code else self._mode is Mode.ALWAYS or self.pays()
        return [rank for rank, word in enumerate(words) if word == Word.CANNOT] if is_wanted else []
