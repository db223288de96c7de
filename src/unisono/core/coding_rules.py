"""Whether a member codes what it sends: whether a link saves more time on the bytes than the coder takes.

A member measures three things while it sends: how long its **link** takes for a byte (`unisono.core.link_speed`); to
which **share** of the bytes the coder brings the messages; and how long coding and
decoding of a byte take. Coding pays where ::

    link seconds per byte * (1 - share) > coder seconds per byte

as if nothing overlapped. Where there is a core to spare, the link carries one message while the next is coded, and more
would be gained than this counts; without one, nothing is lost.

Each member decides by itself, for what it sends, and says with every vote what it will do from then on. So all members
of a wire know how the messages of each come. Nobody codes while one member cannot decode. No bit depends on it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from unisono.core.link_speed import LinkUse

__all__ = ["CodingRule", "Mode", "Word", "coding_members"]

DECAY: Final = 0.7
"""What a measurement counts for when the next one is there."""
MARGIN: Final = 1.25
"""A member begins to code where that saves so many times what it costs, and goes on while it saves anything."""
LOOKS: Final = 7
"""Votes of which the one in the middle says how fast a link is: a process that has to wait for a core looks like a slow
link, once."""
SLOW_S: Final = 2e-9
"""Seconds for a byte: links below 4 Gbit/s. On others the coder is not even measured."""
TRIAL_VOTES: Final = 64
"""A coder that is not used is measured again after so many votes: what is sent changes in the course of a training."""
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
        self._links: deque[float] = deque(maxlen=LOOKS)
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
        """Seconds of the link for a byte; 0: that is not known yet."""
        return statistics.median_low(self._links) if len(self._links) > 1 else 0.0

    def note_link(self, uses: Sequence[LinkUse]) -> None:
        """Note what the links to some of the others have carried since the last vote, as far as that is known.

        The links of a member are used at the same time, so the slowest of them counts for all their bytes.
        """
        if nbytes := sum(use.nbytes for use in uses):
            self._links.append(max(use.seconds for use in uses) / nbytes)

    def note_coded(self, raw: int, coded: int, seconds: float) -> None:
        """Note a message that was coded: bytes before and after, and the time of the processor."""
        self._raw, self._coded, self._coding_s = self._raw + raw, self._coded + coded, self._coding_s + seconds
        if not self._is_on:
            self._votes_to_trial = TRIAL_VOTES

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
        self._votes_to_trial = max(0, self._votes_to_trial - 1)
        self._is_on = self._can_code and (self._mode is Mode.ALWAYS or self.pays())
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
