"""How long the sums of a step are on their way between hosts, by what travels and over which link.

The bytes are those of `docs/decisions.md`: with c nodes on the host that sends most, of ``nbytes`` each, and H hosts,

    sent = nbytes * (1 - 1/H) * (c + 1)

and a link carries as many in each direction. A node leaves when it is complete, which for the first ones is long before
the host has computed its last micro-batch, and one after the other; the sums come back when all have arrived. What
processors do for them (copies, additions, messages) goes on beside it. So an exchange takes the longer of the two, and
then a round trip and a half: chunks there, sums back, the vote. Messages cost by their number, which
grows with the number of hosts and not with the bytes; between many hosts it is they that take the time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unisono.core.errors import UsageError

__all__ = ["NetworkLink", "Traffic", "num_messages", "num_pieces", "parse_link", "seconds_of", "sent_bytes"]

OF_A_FRAME: Final = 1448 / 1514
"""Data in a full TCP segment, of the bytes that travel for it."""
PIECE_BYTES: Final = 1 << 20
LAST_BYTES: Final = (256 << 10, 512 << 10)
"""Of the pieces at the end, from the last one on."""
MOST_PIECES: Final = 96
ROW_BYTES: Final = 512
MESSAGE_S: Final = 23e-6
"""What a processor spends on one message, sent or received (measured by `benchmarks.messages`)."""
_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9}
_LINK: Final = re.compile(r"(\d+(?:\.\d+)?)([kmg])?bit(?:/s)?(?:\+(\d+(?:\.\d+)?)ms)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """What lies between two hosts."""

    bits_per_s: float
    round_trip_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of data, in full segments."""
        return self.bits_per_s / 8 * OF_A_FRAME

    def __str__(self) -> str:
        number, unit = next(
            (
                (self.bits_per_s / size, unit)
                for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6))
                if self.bits_per_s >= size
            ),
            (self.bits_per_s / 1e3, "kbit/s"),
        )
        delay = f" + {1000 * self.round_trip_s:g} ms" if self.round_trip_s else ""
        return f"{number:g} {unit}{delay}"


def parse_link(text: str) -> NetworkLink:
    """Return the link that ``1gbit``, ``100mbit`` or ``100mbit+20ms`` names: its rate, and the time of a round trip.

    Raises:
        UsageError: it names none.
    """
    found = _LINK.fullmatch("".join(text.split()))
    if found is None or float(found[1]) <= 0:
        raise UsageError(
            f"--link is a rate, plus the round-trip time if that is long: 1gbit, 100mbit+20ms; got {text!r}"
        )
    rate = float(found[1]) * _UNITS.get((found[2] or "").lower(), 1.0)
    return NetworkLink(bits_per_s=rate, round_trip_s=float(found[3] or 0) / 1000)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What travels in a step, and what it costs besides the link."""

    hosts: int
    nbytes: int
    """Of a node of the summation tree, as it travels."""
    link: NetworkLink
    own_seconds: float = 0.0
    """By which an exchange made a step longer between ``own_hosts`` hosts whose link was no limit."""
    own_hosts: int = 2
    own_nodes: int = 1
    """Of the host that sent most, there."""


def sent_bytes(nbytes: float, hosts: int, nodes: int) -> float:
    """Return what the host with so many nodes sends in a step."""
    return nbytes * (1 - 1 / hosts) * (nodes + 1)


def seconds_of(traffic: Traffic, complete: Sequence[float] = (0.0,)) -> float:
    """Return by how much the exchange makes a step longer.

    Args:
        complete: of one host, for each node in turn: seconds before the end of all computing at which its sum can
            leave.
    """
    nodes = len(complete)
    sent = sent_bytes(traffic.nbytes, traffic.hosts, nodes)
    one = sent_bytes(traffic.nbytes, traffic.hosts, 0) / traffic.link.bytes_per_s
    left = functools.reduce(lambda busy, before: max(busy, -before) + one, complete, -math.inf)
    on_the_way = max(0.0, left) + one
    own = MESSAGE_S * num_messages(traffic.nbytes, traffic.hosts, nodes)
    measured = traffic.own_seconds - MESSAGE_S * num_messages(traffic.nbytes, traffic.own_hosts, traffic.own_nodes)
    own += max(0.0, measured) * sent / sent_bytes(traffic.nbytes, traffic.own_hosts, traffic.own_nodes)
    return max(on_the_way, own) + 1.5 * traffic.link.round_trip_s


def num_messages(nbytes: float, hosts: int, nodes: int) -> int:
    """Return how many messages a host sends and receives in a step: chunks to their owners, sums, and votes."""
    pieces = num_pieces(int(nbytes))
    owners = min(hosts - 1, max(1, int(nbytes) // pieces // ROW_BYTES))
    return 2 * (owners * pieces * (nodes + 1) + hosts - 1)


def num_pieces(nbytes: int) -> int:
    """Return into how many pieces a sum is cut (`unisono.engine.exchange.stream.cut`)."""
    last = 0
    for size in LAST_BYTES:
        if nbytes >= 2 * size:
            nbytes, last = nbytes - size, last + 1
    return last + min(max(1, -(-nbytes // PIECE_BYTES)), MOST_PIECES - last)
