"""The TCP sockets of this process, as the kernel lists them in ``/proc`` (Linux; elsewhere there are none to be seen).

Nothing is asked of the sockets themselves: most are the script's. (A ``socket.socket`` of Python on a descriptor would
make it non-blocking, for all who have it, wherever the script has set a default timeout.)

The port at which a member's group is formed is closed when the group is there. gloo listens as long as the group lives,
although nobody is to connect to it any more. Whoever does costs the process an open file, and gloo ends the process
when there are no more. The socket that listens is gloo's, and to close it would end the process as well. So the kernel
is told to drop what arrives there (a filter of the socket, on Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from unisono.core.link_speed import Counted

__all__ = ["Port", "TcpSocket", "counted", "shut", "tcp_sockets"]

T = TypeVar("T")

SO_ATTACH_FILTER: Final = 26
TCP_INFO: Final = 11
_INFO_BYTES: Final = 192
_INFO: Final = struct.Struct("=24xI92xQ16xI12xQ8xQQ")
"""Of the kernel's tcp_info (linux/tcp.h): number of packets under way, bytes that were acknowledged, bytes that
wait to be sent, the rate at which they arrive, and the microseconds without room at the receiver, and without data."""
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: return 0
_making = threading.Lock()
"""Held while a socket is made, so that groups that form at the same time do not take each other's."""
_LISTENS: Final = "0A"
_ESTABLISHED: Final = "01"


class TcpSocket(NamedTuple):
    """A socket that listens, or one end of a connection. Addresses are (host, port), IPv4 where that is meant."""

    descriptor: int
    here: tuple[str, int]
    there: tuple[str, int]
    listens: bool


def tcp_sockets() -> dict[int, TcpSocket]:
    """Return the sockets of this process that listen or are connected, by inode."""
    if sys.platform != "linux":
        return {}
    own: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            own[os.readlink(f"/proc/self/fd/{name}")] = int(name)
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a system without IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, here, there, state, *_, inode = line.split()[:10]
                descriptor = own.get(f"socket:[{inode}]")
                if descriptor is not None and state in (_LISTENS, _ESTABLISHED):
                    found[int(inode)] = TcpSocket(descriptor, _address(here), _address(there), state == _LISTENS)
    return found


def shut(sockets: Mapping[int, TcpSocket]) -> None:
    """End connections, by inode: whoever waits for anything on them, at either end, stops waiting."""
    for inode, each in sockets.items():
        with contextlib.suppress(OSError):  # closed meanwhile, or the connection has ended
            copy = os.dup(each.descriptor)
            if os.fstat(copy).st_ino != inode:
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as own:
                own.shutdown(socket.SHUT_RDWR)


def counted(sockets: Mapping[int, TcpSocket]) -> dict[int, Counted]:
    """Return what the kernel has counted of connections, by inode; none where it does not count."""
    found = {}
    for inode, each in sockets.items() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            copy = os.dup(each.descriptor)
            try:
                if os.fstat(copy).st_ino == inode and (info := _tcp_info(copy)):
                    under_way, acknowledged, unsent, rate, no_room, no_data = _INFO.unpack_from(info)
                    found[inode] = Counted(acknowledged, under_way, unsent, no_room + no_data, rate)
            finally:
                os.close(copy)
    return found


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _tcp_info(descriptor: int) -> bytes:
    """Return the kernel's tcp_info of a connection; b"": it has none of these numbers."""
    found, size = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint32(_INFO_BYTES)
    failed = _libc().getsockopt(descriptor, socket.IPPROTO_TCP, TCP_INFO, found, ctypes.byref(size))
    return b"" if failed or size.value < _INFO_BYTES else found.raw


class Port:
    """The sockets that listen for a group. (gloo makes them so that they do not block, as Python's copies would.)"""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self.address: tuple[str, int] = ("", 0)
        """Where it listens; port 0: that cannot be seen."""

    def opened_by(self, make: Callable[[], T]) -> T:
        """Call ``make``; what listens afterwards and did not before is this port."""
        with _making:
            before = tcp_sockets().keys()
            made = make()
            own = [each for inode, each in tcp_sockets().items() if each.listens and inode not in before]
            # A copy of the descriptor: its number may be another socket's by the time that the group is formed.
            self._sockets = [socket.socket(fileno=os.dup(each.descriptor)) for each in own]
            self.address = own[0].here if own else ("", 0)
        return made

    def close(self) -> None:
        """Let nobody connect any more. Connections that are there are left alone."""
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        settings = struct.pack("HP", 1, ctypes.addressof(program))
        for each in self._sockets:
            with contextlib.suppress(OSError):  # a system that cannot do that
                each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, settings)
        self.forget()

    def forget(self) -> None:
        """Leave the port to its owner."""
        for each in self._sockets:
            each.close()
        self._sockets = []


def _address(text: str) -> tuple[str, int]:
    """Return an address of the kernel's table: words of 32 bits in the machine's own order, in hexadecimal digits."""
    digits, port = text.split(":")
    words = [int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:"), int(port, 16)
