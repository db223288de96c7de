"""What the members of one generation exchange beside the sums, also in a thread while the script goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unisono.exchange import Exchange, Parcel

__all__ = ["DirectLine", "Line"]


class Line(Protocol):
    """The members of a generation, as what is brought from one to another needs them. `Members` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def worker_ids(self) -> tuple[str, ...]: ...

    @property
    def hosts(self) -> Sequence[str]:
        """By rank."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all members, by rank. Collective."""

    def deliver(self, parcels: Sequence[Parcel]) -> None:
        """Bring tensors from members that have them to others; see `Exchange.deliver`. Collective."""


class DirectLine:
    """An exchange that a thread uses alone. Whoever waits for the thread looks after losses.

    Attributes:
        sent_bytes: data that this member has sent to other hosts.
    """

    def __init__(self, exchange: Exchange, worker_ids: tuple[str, ...], hosts: Sequence[str]) -> None:
        self._exchange = exchange
        self.worker_ids = worker_ids
        self.hosts = hosts
        self.sent_bytes = 0

    @property
    def rank(self) -> int:
        return self._exchange.rank

    @property
    def size(self) -> int:
        return self._exchange.size

    def gather(self, payload: bytes) -> list[bytes]:
        return self._exchange.all_gather(payload)

    def deliver(self, parcels: Sequence[Parcel]) -> None:
        self.sent_bytes += self._exchange.deliver(parcels)
