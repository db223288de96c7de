"""How fast links are, by what the kernel counts of their connections.

A connection that has data to send all the time shows how fast its link is; one that has sent all it had shows how fast
it was given data, and a receiver may delay the last acknowledgement. So what counts is what has arrived between two
looks at a connection that had a good part of its data still to deliver at both, and whose receiver had room for them.
Some such times in a sum are needed, of which the one in the middle counts: a process that waits for a core looks like a
slow link for a moment. Where there are fewer (little is sent at a time, or the link is fast), the kernel's own estimate
counts. It may be one of another time: the kernel keeps the highest until a connection has data to send all the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["Counted", "LinkSpeed", "LinkUse"]

LEAST_TIMES: Final = 3
"""Between two looks, in a sum, from which on they count."""
MOST_AT_REST: Final = 4
"""Packets that may wait for an acknowledgement that the receiver delays."""


class Counted(NamedTuple):
    """What the kernel has counted of a connection since it was made."""

    acknowledged: int
    """Bytes."""
    num_unacknowledged: int
    """Packets under way."""
    unsent: int
    """Bytes that wait to be sent."""
    held_up: int
    """Microseconds in which the receiver had no room, or the sender no data at hand."""
    bytes_per_s: int
    """The kernel's estimate; 0: none."""

    @property
    def is_busy(self) -> bool:
        return self.unsent > 0 or self.num_unacknowledged > MOST_AT_REST


class LinkUse(NamedTuple):
    """What a link has carried."""

    nbytes: int
    seconds: float


class LinkSpeed:
    """What is known of some connections, between two votes. No I/O, no clock."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._last: Mapping[int, Counted] = {}
        self._at_vote: Mapping[int, Counted] = {}
        self._found: dict[int, list[LinkUse]] = {}

    def note(self, now_s: float, counted: Mapping[int, Counted]) -> None:
        """Note a look at the connections."""
        for key, now in counted.items():
            then = self._last.get(key)
            if then is not None and then.is_busy and now.is_busy and then.held_up == now.held_up:
                nbytes = max(1, now.acknowledged - then.acknowledged)
                self._found.setdefault(key, []).append(LinkUse(nbytes, now_s - self._at_s))
        self._at_s, self._last = now_s, counted

    def take(self) -> list[LinkUse]:
        """Return what the links have carried since the last call, and how long they needed for that."""
        uses = []
        for key, now in self._last.items():
            then = self._at_vote.get(key, Counted(0, 0, 0, 0, 0))
            nbytes, times = now.acknowledged - then.acknowledged, self._found.get(key, ())
            if len(times) >= LEAST_TIMES:
                uses.append(LinkUse(nbytes, nbytes * statistics.median_low(use.seconds / use.nbytes for use in times)))
            elif now.bytes_per_s:
                uses.append(LinkUse(nbytes, nbytes / now.bytes_per_s))
        self._at_vote, self._found = self._last, {}
        return uses
