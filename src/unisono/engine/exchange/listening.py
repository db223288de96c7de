"""The port at which a member's group is formed, closed when the group is there.

gloo listens as long as the group lives, although nobody is to connect to it any more. Whoever does costs the process an
open file, and gloo ends the process when there are no more. The socket that listens is gloo's, and to close it would
end the process as well. So the kernel is told to drop what arrives there (a filter of the socket, on Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from unisono.engine.exchange.sockets import tcp_sockets

__all__ = ["Port"]

T = TypeVar("T")

SO_ATTACH_FILTER: Final = 26
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: return 0
_making = threading.Lock()
"""Held while a socket is made, so that groups that form at the same time do not take each other's."""


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
