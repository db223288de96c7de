"""Counters by which the members of a host publish how far they are in one generation, and wait for each other."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from unisono.core.errors import DeadlineExceeded, PeerLost
from unisono.engine.exchange.pages import GenerationPage, OpenedWorkerPage, WorkerPage
from unisono.engine.exchange.shared_memory import Segment, fence, futex_wait, futex_wake

__all__ = ["Counters"]

SLICE_S = 0.05  # a wait checks its counter this often even if a wake-up was missed


class Counters:
    """This member's counters and those of the others, whose pages are opened at the first wait.

    Every wait ends: when all members have reached the value, at `interrupt`, when a member has left, or after
    ``timeout_s``.

    Args:
        worker_page: this member's own. It may have served earlier generations.
        addresses: of the worker pages of all members of the host, by local rank.
        rank: this member's local rank.
        generation: a number that all members agree on, and that grows from one to the next.
        timeout_s: how long any one wait may take.
        names: the ids of the members' workers, by local rank, for errors; empty: they have none.
    """

    def __init__(
        self,
        worker_page: WorkerPage,
        addresses: Sequence[str],
        rank: int,
        *,
        generation: int,
        timeout_s: float,
        names: Sequence[str] = (),
    ) -> None:
        self.worker_page = worker_page
        self.rank = rank
        self.size = len(addresses)
        self.timeout_s = timeout_s
        self.error: Exception | None = None
        """The error that interrupted this member."""
        self._addresses = list(addresses)
        self._generation = generation
        self._names = names
        self._watched: ctypes.c_uint32 | None = None
        self._segment = Segment.create(GenerationPage.NUM_BYTES)
        self.own = GenerationPage(self._segment)
        self.pages: list[GenerationPage] = []
        """By local rank; empty before the first wait."""
        try:
            worker_page.enter(generation, self._segment.address)
        except ValueError:
            self._segment.close()
            raise

    def check(self) -> None:
        """Check, before this member publishes anything, that it has not left and was not interrupted.

        Raises:
            PeerLost: this member has left. Exception: this member was interrupted; it leaves.
        """
        if self.error is not None:
            self.leave()
            raise self.error
        if self.own.left.value:
            raise self.gone(self.rank)

    def advance(self, name: str) -> int:
        """Add one to a counter of this member, after everything that was written before; return the new value."""
        counter = self.own.counters[name]
        fence()
        counter.value += 1
        futex_wake(counter)
        return counter.value

    def wait(self, name: str, value: int, ranks: Collection[int] | None = None) -> None:
        """Wait until that counter of every member has reached ``value``; a member that cannot wait leaves.

        Args:
            ranks: of the members, by their local ranks, that are waited for; None: all.
        """
        deadline = time.perf_counter() + self.timeout_s
        try:
            with self.or_leave():
                if not self.pages:
                    self.pages = self._meet(deadline)
                for rank in range(self.size) if ranks is None else ranks:
                    page = self.pages[rank]
                    self._watch(rank, page.counters[name], value, page.left, deadline, name)
        finally:
            self._watched = None
        fence()

    def map(self, rank: int, address: bytes) -> Tensor:
        """Return memory of a member by an address on its page; an empty tensor for no address.

        Raises:
            PeerLost: the member is gone.
        """
        if not address:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return self.pages[rank].map(address)
        except FileNotFoundError as error:
            raise self.gone(rank) from error

    def verify(self) -> None:
        """Check that no node of another member was changed before it was read.

        Raises:
            PeerLost: a member has left, and may have changed a node.
        """
        fence()
        for rank, page in enumerate(self.pages):
            if page.left.value:
                raise self.gone(rank)

    def interrupt(self, error: Exception) -> None:
        """Make the current wait (in another thread) and all later waits raise ``error``."""
        self.error = error
        watched = self._watched
        if watched is not None:
            futex_wake(watched)

    def leave(self) -> None:
        """Leave the generation, and publish that: this member's nodes may change from now on. Local."""
        if not self.own.left.value:
            self.own.left.value = 1
            fence()
            for counter in self.own.counters.values():
                futex_wake(counter)

    @contextlib.contextmanager
    def or_leave(self) -> Iterator[None]:
        """Return a context that leaves the generation if its block raises."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def close(self) -> None:
        """Leave, and unmap the memory of the other members."""
        self.leave()
        self._segment.close()
        # The error that ended this generation keeps its frames alive, and with them this object.
        self.error = self.gone(self.rank)
        self.pages = []

    def gone(self, rank: int) -> PeerLost:
        """Return the error for a member that has left."""
        return PeerLost(
            f"{self._name(rank)} has left generation {self._generation}, in which nothing more can be committed",
            self._names[rank : rank + 1],
        )

    def _name(self, rank: int) -> str:
        return f"worker {self._names[rank]}" if self._names else f"local rank {rank} of {self.size}"

    def _meet(self, deadline: float) -> list[GenerationPage]:
        """Wait until all members are in this generation, and open their pages of it."""
        pages = []
        for rank, address in enumerate(self._addresses):
            if rank == self.rank:
                pages.append(self.own)
                continue
            try:
                worker = OpenedWorkerPage(address)
                self._watch(rank, worker.generation, self._generation + 1, None, deadline, "generation")
                page = worker.open_page(self._generation)
            except FileNotFoundError as error:
                raise self.gone(rank) from error
            if page is None:
                raise self.gone(rank)
            pages.append(page)
        return pages

    def _watch(
        self, rank: int, counter: ctypes.c_uint32, value: int, left: ctypes.c_uint32 | None, deadline: float, what: str
    ) -> None:
        """Wait until a counter has reached ``value``."""
        self._watched = counter
        while _is_behind(seen := counter.value, value):
            if self.error is not None:
                raise self.error
            if left is not None and left.value:
                fence()
                if _is_behind(counter.value, value):  # the member did not advance the counter before it left
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


def _is_behind(seen: int, value: int) -> bool:
    """Return whether a 32-bit counter has yet to reach ``value``.

    Members are far less than 2**31 apart, so it does not matter when a counter passes 2**32 and starts again.
    """
    return (seen - value) & 0x80000000 != 0
