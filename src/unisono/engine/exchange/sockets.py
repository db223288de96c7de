"""The TCP sockets of this process, as the kernel lists them in ``/proc`` (Linux; elsewhere there are none to be seen).

Nothing is asked of the sockets themselves: most are the script's. (A ``socket.socket`` of Python on a descriptor would
make it non-blocking, for all who have it, wherever the script has set a default timeout.)
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["TcpSocket", "shut", "tcp_sockets"]

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


def _address(text: str) -> tuple[str, int]:
    """Return an address of the kernel's table: words of 32 bits in the machine's own order, in hexadecimal digits."""
    digits, port = text.split(":")
    words = [int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:"), int(port, 16)
