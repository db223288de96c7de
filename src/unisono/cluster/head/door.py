"""Who comes in: the head's listening socket, and what it does with those who have not shown the run's token.

A stranger costs the head a descriptor and a moment. So there is room for a number of them at a time; the one that has
been there longest makes way for the next (a member needs milliseconds), and none stays for longer than `OPEN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.frames import Frame
from websockets.http11 import Request, Response

from unisono.core.words import count, listed
from unisono.views.page.site import SILENT

__all__ = ["EVERY_S", "MAX_MESSAGE_BYTES", "Allowance", "Caller", "Door", "Refusals", "most_connections", "open_door"]

MAX_MESSAGE_BYTES: Final = 4 * 2**20
OPEN_S: Final = 10.0  # for the TLS handshake, and as long again for the request
AT_ONCE: Final = 16  # connections that are accepted between two looks at the members' messages
FEWEST_STRANGERS: Final = 64
MOST_CONNECTIONS: Final = 4096
WITHOUT_TOKEN: Final = "without the run's token"
NO_REQUEST: Final = "that used a different protocol"
TOO_SLOW: Final = f"that had not said what it wanted after {OPEN_S:.0f} s"
PIECE_BYTES: Final = 512
FRAME_BYTES: Final = 64  # what reading a frame costs, in bytes of a long one
MOST_UNREAD_BYTES: Final = 2**20
LOOK_S: Final = 0.05
NO_ROOM: Final = "that was silent while others waited"
EVERY_S: Final = 60.0
"""Between two sentences about refusals."""


class Refusals:
    """Counts refused connections. The first is told at once, all others as a number, once a minute.

    Args:
        tell: shows a sentence to the user.
        later: calls a function after so many seconds.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._later = later
        self._clock = clock
        self._since: float | None = None
        self._untold: Counter[str] = Counter()
        self._last = ""

    def note(self, why: str, where: str) -> bool:
        """Count one.

        Args:
            why: ends the sentence "a connection ...": "without the run's token".
            where: the address that it came from.

        Returns:
            Whether it was told at once.
        """
        self._last = where
        if self._since is None:
            self._since = self._clock()
            self._tell(f"the head rejected a connection {why}, from {where}; the run continues")
            self._later(EVERY_S, self._tell_number)
            return True
        self._untold[why] += 1
        return False

    def _tell_number(self) -> None:
        assert self._since is not None
        now = self._clock()
        seconds, self._since = now - self._since, None
        if not self._untold:
            return
        total = count(self._untold.total(), "more connection")
        kinds = listed([f"{number} {why}" for why, number in self._untold.most_common()])
        self._tell(f"the head rejected {total} in {seconds:.0f} s ({kinds}), the last from {self._last}")
        self._untold.clear()
        self._since = now
        self._later(EVERY_S, self._tell_number)


def most_connections(fewest: int) -> int:
    """Return how many connections of one kind there may be: they must leave descriptors for the members."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(fewest, min(MOST_CONNECTIONS, limit // 4))


class Door(socket.socket):
    """A socket that listens, and remembers whom it has let in and who is still a stranger."""

    def __init__(self, listener: socket.socket, refusals: Refusals) -> None:
        family, kind, protocol = listener.family, listener.type, listener.proto
        super().__init__(family, kind, protocol, os.dup(listener.fileno()))
        self._refusals = refusals
        self._most = most_connections(FEWEST_STRANGERS)
        self._strangers: dict[int, tuple[socket.socket, str]] = {}  # by descriptor; the oldest first

    def listen(self, backlog: int = 0, /) -> None:
        """Do nothing: the socket listens, with the backlog that its maker has chosen."""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._strangers.pop(connection.fileno(), None)  # that one has closed
        if len(self._strangers) >= self._most:
            self._make_room()
        self._strangers[connection.fileno()] = connection, str(address[0])
        return connection, address

    def admit(self, descriptor: int) -> None:
        """Note that the connection with this descriptor is no stranger's."""
        self._strangers.pop(descriptor, None)

    def _make_room(self) -> None:
        self._strangers = {fd: known for fd, known in self._strangers.items() if known[0].fileno() == fd}
        if len(self._strangers) >= self._most:
            oldest, where = self._strangers.pop(next(iter(self._strangers)))
            self._refusals.note(NO_ROOM, where)
            with contextlib.suppress(OSError):  # it has just gone
                oldest.shutdown(socket.SHUT_RDWR)


class Allowance:
    """How much somebody may send: so many bytes a second in the mean, and so many at once.

    Args:
        bytes_per_s: may change while it is used.
    """

    def __init__(self, most_bytes: int, bytes_per_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._most = most_bytes
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._used, self._at = 0.0, clock()

    def take(self, num_bytes: int) -> float:
        """Count what has come; return for how many seconds nothing more may come."""
        now, rate = self._clock(), self._bytes_per_s()
        self._used = max(0.0, self._used - (now - self._at) * rate) + num_bytes
        self._at = now
        return max(0.0, (self._used - self._most) / rate)


class Caller(ServerConnection):
    """A connection that may be a stranger's."""

    refusals: Refusals
    where = ""
    """The address that it comes from."""
    _allowance: Allowance | None = None
    """What may come over it; None: anything, because it is a member's."""

    def slow_down(self, allowance: Allowance) -> None:
        """From now on, read no more than that."""
        self._unread = bytearray()
        self._is_waiting = False
        self._allowance = allowance

    def data_received(self, data: bytes) -> None:
        if self._allowance is None:
            super().data_received(data)
            return
        self._unread += data
        if len(self._unread) > MOST_UNREAD_BYTES:
            self.transport.abort()
        elif not self._is_waiting:
            self._read_on()

    def _read_on(self) -> None:
        """Read what has come, in small pieces: each of the frames that a flood consists of takes a moment to read."""
        assert self._allowance is not None
        was_waiting, self._is_waiting = self._is_waiting, False
        if self.transport.is_closing():
            return
        wait_s = 0.0
        while self._unread and not wait_s:
            if self.recv_messages.paused:  # so many messages wait to be dealt with
                wait_s = LOOK_S
                break
            piece = bytes(self._unread[:PIECE_BYTES])
            del self._unread[:PIECE_BYTES]
            super().data_received(piece)
            wait_s = self._allowance.take(len(piece))
        if wait_s:
            self._is_waiting = True
            self.transport.pause_reading()
            self.loop.call_later(max(wait_s, LOOK_S), self._read_on)
        elif was_waiting:
            self.transport.resume_reading()

    def process_event(self, event: Any) -> None:
        if self._allowance is not None and isinstance(event, Frame):
            self._allowance.take(FRAME_BYTES)
        super().process_event(event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.where = str((transport.get_extra_info("peername") or ["an unknown address"])[0])

    async def handshake(self, *arguments: Any, **more: Any) -> None:
        try:
            await super().handshake(*arguments, **more)
        except asyncio.CancelledError:  # its time is up, or the head ends
            if self.server.is_serving() and self.response is None:  # else it was slow to take its answer
                self.refusals.note(NO_REQUEST if self.protocol.handshake_exc else TOO_SLOW, self.where)
            raise
        failure = self.protocol.handshake_exc
        if self.response is not None and self.response.status_code == HTTPStatus.UNAUTHORIZED:
            self.refusals.note(WITHOUT_TOKEN, self.where)
        elif self.request is None and failure is not None and not isinstance(failure.__cause__, EOFError):
            self.refusals.note(NO_REQUEST, self.where)  # an early end is a probe of the port: no refusal


async def open_door(
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    refusals: Refusals,
    *,
    request: Callable[[ServerConnection, Request], Response | None],
    handler: Callable[[Caller], Awaitable[None]],
) -> Server:
    """Serve on a socket that listens.

    Args:
        tls: settings of TLS; None: connections are in the clear.
        request: answers a request; None: the caller has the token and wants a WebSocket.
        handler: talks to those.
    """
    door = Door(listener, refusals)
    calls = type("Caller", (Caller,), {"refusals": refusals})

    def ask(connection: ServerConnection, asked: Request) -> Response | None:
        response = request(connection, asked)
        if response is None:
            door.admit(connection.transport.get_extra_info("socket").fileno())
        return response

    async def talk(connection: ServerConnection) -> None:
        assert isinstance(connection, Caller)
        await handler(connection)

    return await serve(
        talk,
        sock=door,
        ssl=tls,
        backlog=AT_ONCE,
        create_connection=calls,
        process_request=ask,
        compression=None,
        ping_interval=None,
        open_timeout=OPEN_S,
        max_size=MAX_MESSAGE_BYTES,
        close_timeout=1.0,
        server_header=None,
        logger=SILENT,
    )
