"""Context of an exchange: the values that every exchange is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from unisono.core.coding_rules import Mode
from unisono.core.errors import UsageError
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.exchange.pairs import Pairs
from unisono.engine.exchange.wire import Wire

__all__ = ["Builder", "Context"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """This member and the others of one generation, as a `Builder` gets them."""

    generation: int
    """Number of the generation; grows from one exchange of a worker to the next."""
    rank: int
    hosts: tuple[range, ...]
    """The ranks of each host's members: contiguous and ascending."""
    device: torch.device
    timeout_s: float
    """Longest time of any one wait."""
    store: Callable[[str], dist.Store]
    """Makes the store in which the members of a group of this generation find each other, by the group's name."""
    names: Sequence[str] = ()
    """The ids of the members' workers, by rank, for errors; empty: they have none."""
    address: str = "127.0.0.1"
    """The network address at which others reach this member."""
    secret: bytes = field(default=b"", repr=False)
    """What the members of a group that crosses the network prove to each other that they have."""
    page: WorkerPage | None = None
    """This worker's page in the shared memory of its host."""
    pages: Sequence[str] = ()
    """The addresses of all members' pages, by rank."""
    checks: bool = False
    """Compare what arrives over the network with what was sent; equal on all members."""
    coding: Mode = Mode.AUTO
    """Whether what crosses the network is coded to fewer bytes."""

    def open_host(self) -> Counters:
        """Enter the generation among the members of this host. Waits for nobody."""
        ranks = next(ranks for ranks in self.hosts if self.rank in ranks)
        if self.page is None:
            raise UsageError("this worker has no shared memory: choose --exchange gloo")
        return Counters(
            self.page,
            [self.pages[rank] for rank in ranks],
            ranks.index(self.rank),
            generation=self.generation,
            timeout_s=self.timeout_s,
            names=[self.names[rank] for rank in ranks if self.names],
        )

    def open_wire(self, name: str, ranks: Sequence[int]) -> Wire:
        """Begin to connect this member with those of ``ranks``, of which it is one. Waits for nobody."""
        return Wire(
            self.store(name),
            ranks.index(self.rank),
            len(ranks),
            device=self.device,
            address=self.address,
            timeout_s=self.timeout_s,
            names=[self.names[rank] for rank in ranks if self.names],
            secret=self.secret,
            checks=self.checks,
            coding=self.coding,
        )

    def open_pairs(self, name: str, ranks: Sequence[int], *, shares_memory: bool) -> Pairs:
        """Begin to connect this member with each of ``ranks``, of which it is one, by itself. Waits for nobody.

        Args:
            shares_memory: members on one host use shared memory.
        """
        host_of = {rank: host for host, members in enumerate(self.hosts) for rank in members}
        return Pairs(
            self.open_wire(name, ranks),
            [host_of[rank] if shares_memory else rank for rank in ranks],
            generation=self.generation,
            timeout_s=self.timeout_s,
            names=[self.names[rank] for rank in ranks if self.names],
        )


Builder = Callable[[Context], Exchange]
"""Begins to connect this member with the others; does not wait for them."""
