"""Meter of a wire: tells waiting for a member from waiting for bytes.

A member **arrives** when it has computed everything that it brings to a combine. With its word that it holds all sums
(the vote), each member tells how long ago it has arrived, and how long its links will still be busy with what it has
sent: the vote stands behind that. When all votes are there, a member knows when each other one has arrived. It has
waited for the last of them, from its own arrival on, but not while its own links were busy, because then the network
was what took long. The rest of the time in which a member was blocked
belongs to the network; but where links were idle for most of it, members were adding up, and only what is left of it
does.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.exchange.connections import Connections, Counts
from unisono.exchange.spent import Carried, Spent

__all__ = ["WORD_BYTES", "Meter", "told_apart"]

_WORD: Final = struct.Struct("<ffi")
WORD_BYTES: Final = _WORD.size
"""Of what a meter adds to the vote of each member."""
UNKNOWN: Final = -1.0
GRAIN_S: Final = 0.004
"""The kernel counts how long links are busy in steps of this length."""
AT_ONCE_S: Final = 0.0005
"""Between two readings that are so close, nothing is counted."""
MOSTLY: Final = 0.5
"""Where links were busy for this part of a time at least, all of it was the network's: the kernel's count is coarse."""
DELAYED_ACK_S: Final = 0.1
"""A receiver may confirm 40 ms later, twice in a combine, and the link looks busy meanwhile."""


class Meter:
    """Measures what one member does on a wire, one combine after the other.

    Args:
        rank: of this member on the wire.

    Attributes:
        connections: of the wire, when they are there.
    """

    def __init__(self, rank: int) -> None:
        self.connections = Connections()
        self._rank = rank
        self._latest = rank
        self._arrived_at = math.inf
        self._blocked_s = 0.0
        self._opened_at = -math.inf
        self._opened: Mapping[int, Counts] = {}
        self._at_arrival: Mapping[int, Counts] = {}
        self._last: Mapping[int, Counts] = {}

    def open(self) -> None:
        """Note that the first rows of a combine are about to be sent."""
        self._arrived_at, self._blocked_s = math.inf, 0.0
        self._opened, self._opened_at = self.connections.read(), time.perf_counter()

    def arrive(self, latest: int) -> None:
        """Note that everything which this member brings is computed.

        Args:
            latest: rank, in the generation, of the member of this host that has computed longest.
        """
        self._latest = latest
        now = time.perf_counter()
        self._at_arrival = self._opened if now - self._opened_at < AT_ONCE_S else self.connections.read()
        self._arrived_at = now

    def block(self, started: float) -> None:
        """Note that this member has waited for a message since ``started``, by ``time.perf_counter``."""
        self._blocked_s += max(0.0, time.perf_counter() - max(started, self._arrived_at))

    def word(self) -> bytes:
        """Return what goes with this member's vote, now."""
        since, busy_s = time.perf_counter() - self._arrived_at, UNKNOWN
        if self.connections.is_known:
            now = self.connections.read()
            ahead = {rank: _time_of_queue(self._opened.get(rank, NOTHING), counts) for rank, counts in now.items()}
            busy = _since(self._at_arrival, now)
            since += max(ahead.values())
            busy_s = max(busy[rank].busy_s + ahead[rank] for rank in now)
        return _WORD.pack(since, busy_s, self._latest)

    def close(self, words: Sequence[bytes], members: Sequence[int]) -> Spent:
        """Return where the time of the combine has gone, when all votes have come.

        Args:
            words: of all members of the wire, by its ranks.
            members: by rank of the wire, the member's rank in the generation.
        """
        told = [_WORD.unpack(word) for word in words]
        since, busy, latest = ([each[column] for each in told] for column in range(3))
        took_s = time.perf_counter() - self._arrived_at
        waited_for, waiting_s, network_s = told_apart(took_s, since, busy, self._rank, self._blocked_s)
        now = self.connections.read()
        links = _since(self._last or self._opened, now)
        overlap = _since(self._opened, self._at_arrival)
        self._last = now
        return Spent(
            waiting={latest[waited_for]: waiting_s} if waiting_s > 0.0 else {},
            network_s=network_s,
            overlap_s=max((each.busy_s for each in overlap.values()), default=0.0),
            links={members[rank]: carried for rank, carried in links.items()},
        )


def told_apart(
    took_s: float, since: Sequence[float], busy: Sequence[float], rank: int, blocked_s: float
) -> tuple[int, float, float]:
    """Return for whom a member has waited, how long, and how long for the network. Pure.

    Args:
        took_s: seconds from the member's arrival until all votes were there.
        since: by rank, seconds from a member's arrival until its vote is there.
        busy: by rank, for how many of them the member's busiest link is busy; negative: unknown.
        rank: the member.
        blocked_s: how long the member was blocked since its arrival.
    """
    last = min((each for each in range(len(since)) if each != rank), key=since.__getitem__, default=rank)
    waiting_s = max(0.0, min(blocked_s, took_s - max(since[last], busy[rank] - DELAYED_ACK_S)))
    network_s = blocked_s - waiting_s
    if min(busy) >= 0.0 and max(busy) + GRAIN_S < network_s * MOSTLY:
        network_s = max(busy) + GRAIN_S
    return last, waiting_s, network_s


NOTHING: Final = Counts(0.0, 0, 0)


def _time_of_queue(before: Counts, now: Counts) -> float:
    """Return how long it will take until all is confirmed that was sent, at the rate since then."""
    confirmed = now.nbytes - before.nbytes
    return (now.busy_s - before.busy_s) * now.queued / confirmed if confirmed > 0 else 0.0


def _since(before: Mapping[int, Counts], now: Mapping[int, Counts]) -> dict[int, Carried]:
    return {
        rank: Carried(
            counts.busy_s - before.get(rank, NOTHING).busy_s, counts.nbytes - before.get(rank, NOTHING).nbytes
        )
        for rank, counts in now.items()
    }
