"""How busy the connections of a group are, as the kernel counts it.

For each TCP connection Linux counts how long data was on its way (written and not confirmed) and how many bytes were
confirmed (``TCP_INFO``; tcp(7)). That is measured where it happens, costs a microsecond to read, and tells a slow link
from a slow peer: a peer that does not send leaves the link idle. The sockets are gloo's, and are only looked
at: a copy of a descriptor would keep a connection open after gloo has closed it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from unisono.exchange.sockets import tcp_sockets

__all__ = ["Connections", "Counts", "connections_since"]

TCP_INFO: Final = 11
_COUNTS: Final = struct.Struct("=16xI4xI92xQ16xI20xQ")
"""The fields of ``struct tcp_info`` that are read: size of a segment, segments that are not confirmed, bytes that are
confirmed, bytes that are not sent yet, and busy time in microseconds."""


class Counts(NamedTuple):
    """What the kernel has counted of what this member has sent over a link."""

    busy_s: float
    nbytes: int
    """That are confirmed."""
    queued: int
    """Bytes that are not confirmed yet."""


class Connections:
    """The connections of one group, by the rank of the other member.

    Args:
        descriptors: by rank, those of its sockets. They may be closed meanwhile.
    """

    def __init__(self, descriptors: Mapping[int, Sequence[int]] | None = None) -> None:
        self._descriptors = {rank: tuple(numbers) for rank, numbers in (descriptors or {}).items()}
        self._info = ctypes.create_string_buffer(_COUNTS.size)
        self._length = ctypes.c_uint32()
        self._at_length = ctypes.byref(self._length)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._descriptors)

    def read(self) -> dict[int, Counts]:
        """Return what this member has sent over each since it was connected, by rank."""
        return {rank: self._read(numbers) for rank, numbers in self._descriptors.items()}

    def _read(self, descriptors: Sequence[int]) -> Counts:
        busy_us, nbytes, queued = 0, 0, 0
        for descriptor in descriptors:
            self._length.value = _COUNTS.size
            if _getsockopt(descriptor, socket.IPPROTO_TCP, TCP_INFO, self._info, self._at_length):
                continue  # it is closed
            if self._length.value < _COUNTS.size:
                continue  # of an older kernel
            segment, in_flight, acked, unsent, busy = _COUNTS.unpack_from(self._info)
            busy_us, nbytes, queued = max(busy_us, busy), nbytes + acked, queued + unsent + in_flight * segment
        return Counts(busy_us / 1e6, nbytes, queued)


def connections_since(before: Mapping[int, object], addresses: Sequence[str], rank: int) -> Connections:
    """Return the connections to the other members that were made since then.

    Where several members have one address, all connections to it count as those to the first of them.

    Args:
        before: what `tcp_sockets` returned before the group was formed.
        addresses: of the members, by rank.
        rank: of this member.
    """
    by_address = {_plain(address): other for other, address in reversed([*enumerate(addresses)]) if other != rank}
    descriptors: dict[int, list[int]] = {}
    for inode, each in tcp_sockets().items():
        if inode not in before and each.there[0] in by_address:
            descriptors.setdefault(by_address[each.there[0]], []).append(each.descriptor)
    return Connections(descriptors)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]


_getsockopt = ctypes.PyDLL(None).getsockopt  # it never waits, so it need not give up the interpreter
