"""Counters by which the members of a host publish how far they are in one generation, and wait for each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from unisono.engine.exchange.pages import GenerationPage, OpenedWorkerPage, WorkerPage
from unisono.engine.exchange.shared_memory import Segment, fence, futex_wake
from unisono.engine.exchange.watcher import Watcher

__all__ = ["Counters"]


class Counters(Watcher):
    """This member's counters and those of the others, whose pages are opened at the first wait.

    A member that has left may change its nodes. A wait is over when all members have reached the value.

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
        self._segment = Segment.create(GenerationPage.NUM_BYTES)
        self.own = GenerationPage(self._segment)
        super().__init__(self.own, rank, len(addresses), generation=generation, timeout_s=timeout_s, names=names)
        self.worker_page = worker_page
        self._addresses = list(addresses)
        self.pages: list[GenerationPage] = []
        """By local rank; empty before the first wait."""
        try:
            worker_page.enter(generation, self._segment.address)
        except ValueError:
            self._segment.close()
            raise

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

    def close(self) -> None:
        """Leave, and unmap the memory of the other members."""
        self.leave()
        self._segment.close()
        # The error that ended this generation keeps its frames alive, and with them this object.
        self.error = self.gone(self.rank)
        self.pages = []

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
