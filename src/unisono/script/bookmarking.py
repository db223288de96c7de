"""The workers of a run tell each other their newest bookmarks of streams (`unisono.engine.microbatch.bookmarks`)."""

from __future__ import annotations

import msgspec

from unisono.core.stream_plan import WantedSamples
from unisono.engine.microbatch.bookmarks import Bookmark, Bookmarks
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.engine.rounds.gathering import TalkRound
from unisono.engine.rounds.life import Rounds

__all__ = ["Bookmarking"]

EVERY = 1024
"""Samples of each stream between two exchanges."""
RARELY = 16
"""Delays between two exchanges, at least: each exchange waits for what is under way, which a delay is to hide."""


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
        first: samples of each stream before the loop.
        delay: steps of which the gradients are under way.
    """

    def __init__(self, bookmarks: Bookmarks, key: str, share: int, *, first: int = 0, delay: int = 0) -> None:
        self._bookmarks = bookmarks
        self._key = key
        self._share, self._first = share, first
        self._every = max(EVERY, RARELY * delay * share)
        self._reading: StreamFetcher | None = None

    def is_of_use(self) -> bool:
        """Return whether these data may have bookmarks. Local, equal on all workers."""
        return not self._bookmarks.has_none(self._key)

    def find(self, wanted: WantedSamples) -> Bookmark | None:
        """Return the bookmark from which a reader comes to these samples, if there is one. Local."""
        return self._bookmarks.find(self._key, wanted)

    def reads_with(self, reading: StreamFetcher) -> None:
        """Note what reads the streams in this loop. Local."""
        self._reading = reading

    def is_due(self, last: int, step: int) -> bool:
        """Return whether it is time for an exchange before a step, where it was asked before step ``last``."""
        before, now = (self._first + at * self._share for at in (last, step))
        return step > 0 and before // self._every != now // self._every

    def exchange(self, last: int, step: int, rounds: Rounds) -> None:
        """Exchange bookmarks before a step of the loop or at its end, where it is time for it. Collective.

        Args:
            last: the step before which this was called last; all workers give the same two numbers.
        """
        if not self.is_due(last, step) or not self.is_of_use():
            return
        round_ = TalkRound(rounds, "an exchange of states of streams", self._letter)
        for _ in rounds.play(round_):
            pass
        letters = [msgspec.msgpack.decode(value, type=_Letter) for value in round_.values]
        self._bookmarks.agree(self._key, [one.able for one in letters], [one.found for one in letters])
        if not self.is_of_use() and self._reading is not None:
            self._reading.taken.stop()

    def _letter(self) -> bytes:
        assert self._reading is not None
        found = {
            stream: bookmark
            for stream, bookmark in self._reading.bookmarks().items()
            if not self._bookmarks.knows(self._key, stream, bookmark)
        }
        return msgspec.msgpack.encode(_Letter(self._reading.taken.able, found))
