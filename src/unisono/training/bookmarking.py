"""The workers of a run tell each other their newest bookmarks of streams (`unisono.microbatch.bookmarks`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from unisono.decisions.streams import Wanted
from unisono.microbatch.bookmarks import Bookmark, Bookmarks, Taken
from unisono.rounds.life import Rounds
from unisono.rounds.talking import TalkRound

__all__ = ["Bookmarking"]

EVERY = 1024
"""Samples of each stream between two exchanges."""


class Reading(Protocol):
    """Reads streams, and takes bookmarks (`unisono.microbatch.streamfetcher.StreamFetcher`)."""

    taken: Taken

    def bookmarks(self) -> dict[int, Bookmark]:
        """Return the newest bookmark of each stream that was read, up to what was fetched."""


class _Letter(msgspec.Struct, frozen=True):
    """What one worker says."""

    able: bool | None
    found: dict[int, Bookmark]


class Bookmarking:
    """The exchanges of one training loop.

    Args:
        bookmarks: those that all workers know, of all data of the run.
        key: of the data, the same on all workers.
        share: samples of each stream in a step.
    """

    def __init__(self, bookmarks: Bookmarks, key: str, share: int) -> None:
        self._bookmarks = bookmarks
        self._key = key
        self._every = -(-EVERY // share)
        self._reading: Callable[[], Reading] | None = None

    def find(self, wanted: Wanted) -> Bookmark | None:
        """Return the bookmark from which a reader comes to these samples, if there is one. Local."""
        return self._bookmarks.find(self._key, wanted)

    def reads_with(self, reading: Reading) -> None:
        """Note what reads the streams in this loop. Local."""
        self._reading = lambda: reading

    def exchange(self, last: int, step: int, rounds: Rounds) -> None:
        """Exchange bookmarks before a step of the loop, where it is time for it. Collective.

        Args:
            last: the step before which this was called last; all workers give the same two numbers.
        """
        if step == 0 or step // self._every == last // self._every or self._bookmarks.has_none(self._key):
            return
        round_ = TalkRound(rounds, "an exchange of states of streams", self._letter)
        for _ in rounds.play(round_):
            pass
        letters = [msgspec.msgpack.decode(value, type=_Letter) for value in round_.values]
        self._bookmarks.agree(self._key, [one.able for one in letters], [one.found for one in letters])

    def _letter(self) -> bytes:
        assert self._reading is not None
        reading = self._reading()
        return msgspec.msgpack.encode(_Letter(reading.taken.able, reading.bookmarks()))
