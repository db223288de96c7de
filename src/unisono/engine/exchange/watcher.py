"""Waits of a member for words in the shared memory of other members of its host."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from unisono.core.errors import DeadlineExceeded, PeerLost
from unisono.engine.exchange.shared_memory import fence, futex_wait, futex_wake

__all__ = ["Watcher", "is_behind"]

SLICE_S = 0.05  # a wait checks its word this often even if a wake-up was missed


class Page(Protocol):
    """Page of a member, which others wait for; this is all of its words."""

    left: ctypes.c_uint32
    """1: the member has left the generation."""

    @property
    def words(self) -> Collection[ctypes.c_uint32]:
        """Return the words that others may wait for."""


class Watcher:
    """Waits for the members of a generation on one host. Every wait ends: when the word has the value, at `interrupt`,
    when the other member has left, or after ``timeout_s``. A waiting thread sleeps.

    Args:
        page: of this member.
        rank: of this member among those that it waits for.
        generation: for errors.
        timeout_s: how long any one wait may take.
        names: the ids of the members' workers, by rank, for errors; empty: they have none.
    """

    def __init__(
        self, page: Page, rank: int, size: int, *, generation: int, timeout_s: float, names: Sequence[str] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.error: Exception | None = None
        """The error that interrupted this member."""
        self._page = page
        self._generation = generation
        self._names = names
        self._watched: ctypes.c_uint32 | None = None

    def check(self) -> None:
        """Check, before this member publishes anything, that it has not left and was not interrupted.

        Raises:
            PeerLost: this member has left. Exception: this member was interrupted; it leaves.
        """
        if self.error is not None:
            self.leave()
            raise self.error
        if self._page.left.value:
            raise self.gone(self.rank)

    def leave(self) -> None:
        """Leave the generation, and publish that. Local."""
        if not self._page.left.value:
            self._page.left.value = 1
            fence()
            for word in self._page.words:
                futex_wake(word)

    @contextlib.contextmanager
    def or_leave(self) -> Iterator[None]:
        """Return a context that leaves the generation if its block raises."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def interrupt(self, error: Exception) -> None:
        """Make the current wait (in another thread) and all later waits raise ``error``."""
        self.error = error
        watched = self._watched
        if watched is not None:
            futex_wake(watched)

    def rest(self, word: ctypes.c_uint32, seen: int, seconds: float = SLICE_S) -> None:
        """Sleep until a word of another member may differ from ``seen``, this member is interrupted, or the seconds are
        over. Local.
        """
        self._watched = word
        if self.error is None:
            futex_wait(word, seen, seconds)
        self._watched = None

    def gone(self, rank: int) -> PeerLost:
        """Return the error for a member that has left."""
        return PeerLost(
            f"{self._name(rank)} has left generation {self._generation}, in which nothing more can be committed",
            self._names[rank : rank + 1],
        )

    def _name(self, rank: int) -> str:
        return f"worker {self._names[rank]}" if self._names else f"local rank {rank} of {self.size}"

    def _watch(
        self, rank: int, counter: ctypes.c_uint32, value: int, left: ctypes.c_uint32 | None, deadline: float, what: str
    ) -> None:
        """Wait until a counter of a member has reached ``value``; ``left``: its word that says that it has left."""
        self._watched = counter
        while is_behind(seen := counter.value, value):
            if self.error is not None:
                raise self.error
            if left is not None and left.value:
                fence()
                if is_behind(counter.value, value):  # the member did not advance the counter before it left
                    raise self.gone(rank)
                return
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                raise DeadlineExceeded(
                    f"waited {self.timeout_s:.0f} s for {self._name(rank)} "
                    f"in generation {self._generation}: '{what}' is {seen}, needs {value}",
                    self._names[rank : rank + 1],
                )
            futex_wait(counter, seen, min(remaining, SLICE_S))


def is_behind(seen: int, value: int) -> bool:
    """Return whether a 32-bit counter has yet to reach ``value``.

    Members are far less than 2**31 apart, so it does not matter when a counter passes 2**32 and starts again.
    """
    return (seen - value) & 0x80000000 != 0
