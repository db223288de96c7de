"""Help within a host: a member that is done computes leaves of a late member."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.pages import MAX_WORK, GenerationPage
from unisono.engine.exchange.shared_memory import fence, futex_wake

__all__ = ["HostWork"]


class HostWork:
    """Leaves that the members of one host still have to compute: a member that is done takes some of a late one.

    All methods are local. See `unisono.engine.exchange.host` for why no leaf is lost, or counted twice.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._own = counters.own
        self._fields = counters.own.fields
        self._coming = 1  # the number of the combine that this member publishes next, as a counter shows it
        self._deadline = 0.0

    def end(self) -> None:
        """Note that this member begins to publish: leaves shown from now on are for the next combine. Local."""
        self._coming = (self._coming + 1) & 0xFFFFFFFF

    def show_work(self, todo: Sequence[int]) -> None:
        """Publish the leaves that this member is going to compute, in this order, before its next `Combine.publish`.

        The first leaf counts as started, so every member computes at least one leaf and its pace can be measured.
        """
        fields = self._fields
        fields.work[0] = 0
        fence()
        shown = todo if len(todo) <= MAX_WORK else ()
        fields.todo[: len(shown)] = list(shown)
        fields.num_todo = len(shown)
        fields.started[0] = min(1, len(shown))
        fields.num_taken[0] = 0
        self._deadline = time.perf_counter() + self._counters.timeout_s
        fence()
        fields.work[0] = self._coming
        futex_wake(self._own.work)

    def start(self, index: int, leaf: int) -> bool:
        """Start the leaf at ``index`` of this member's list. False: another member has taken the leaf; leave it out."""
        if index:
            self._fields.started[0] = index + 1
            fence()
            futex_wake(self._own.started)
        return leaf not in self._taken()

    def take(self, paces: Sequence[float], elapsed_s: float) -> int | None:
        """Take a leaf of a late member for this one, which is done; None if helping would not save time.

        This member **must** compute the leaf, and publish a node that covers the leaf in its next combine.

        Args:
            paces: by local rank, known seconds for a leaf.
            elapsed_s: seconds since the members have published their work.
        """
        number = self._fields.num_taken[0]
        if self._own.left.value or number >= MAX_WORK:
            return None
        taken = self._taken()
        own_rank = self._counters.rank
        best: tuple[float, int] | None = None
        for rank, page in enumerate(self._counters.pages):
            if rank == own_rank or not self._is_at_work(page):
                continue
            started, left = _not_started(page, taken)
            if not left:
                continue
            # The member may be slower than it was, and is in the middle of the leaf that it has started last.
            pace = max(paces[rank], elapsed_s / (started - 0.5))
            begins_last_in_s = (len(left) - 0.5) * pace
            if begins_last_in_s > paces[own_rank] and (best is None or begins_last_in_s > best[0]):
                best = (begins_last_in_s, left[-1])
        if best is None:
            return None
        self._fields.taken[number] = best[1]
        fence()
        self._fields.num_taken[0] = number + 1
        fence()
        return best[1]

    def pause(self, seconds: float) -> bool:
        """Wait for so many seconds, if another member has leaves that it has not started; wait longer for one that has
        not published its work yet. May return early. False: there is nothing to wait for.

        Beginning the combine earlier would gain nothing, because the combine needs that member anyway.
        """
        if self._counters.error is not None or self._own.left.value or time.perf_counter() > self._deadline:
            return False
        taken = self._taken()
        coming: tuple[GenerationPage, int] | None = None
        for page in self._counters.pages:
            if page is self._own or page.left.value:
                continue
            shown = page.work.value
            if shown != self._coming:
                coming = page, shown
                continue
            fence()
            started, left = _not_started(page, taken)
            if left:  # whether it is late is a question of time
                self._counters.rest(page.started, started, seconds)
                return True
        if coming is not None:  # it wakes this member with its work, or when it leaves
            page, shown = coming
            self._counters.rest(page.work, shown)
        return coming is not None

    def _taken(self) -> set[int]:
        at_work = [page.fields for page in self._counters.pages if self._is_at_work(page)]
        return {leaf for fields in at_work for leaf in fields.taken[: fields.num_taken[0]]}

    def _is_at_work(self, page: GenerationPage) -> bool:
        """Return whether the lists on a page are for the combine that this member will publish next."""
        at_work: bool = page.work.value == self._coming
        fence()
        return at_work


def _not_started(page: GenerationPage, taken: set[int]) -> tuple[int, list[int]]:
    """Return how many leaves a member has started, and its leaves that no member has started or taken."""
    started = page.fields.started[0]
    return started, [leaf for leaf in page.fields.todo[started : page.fields.num_todo] if leaf not in taken]
