"""One WebSocket connection from a worker to the head, driven by the thread of `unisono.member`."""

from __future__ import annotations

import contextlib
import socket

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from unisono.errors import UnisonoError
from unisono.lifetime import end_when_silent
from unisono.messages import is_refusal

__all__ = ["Link", "Refused"]

CONNECT_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 4 * 2**20


class Refused(UnisonoError):
    """The head wants no connection, now or later: the token is not the run's."""


class Link:
    """One WebSocket connection without a thread of its own.

    Raises:
        Refused: the head says so. OSError: there is no connection, or it is lost; also of all methods but `close`.
    """

    def __init__(self, url: str, token: str) -> None:
        uri = parse_uri(url)
        self._protocol = ClientProtocol(uri, max_size=MAX_MESSAGE_BYTES)
        self.sock = socket.create_connection((uri.host, uri.port), timeout=CONNECT_TIMEOUT_S)
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_when_silent(self.sock)
            request = self._protocol.connect()
            request.headers["Authorization"] = f"Bearer {token}"
            self._protocol.send_request(request)
            self.sock.sendall(b"".join(self._protocol.data_to_send()))
            while True:
                data = self.sock.recv(65536)
                self._protocol.receive_data(data) if data else self._protocol.receive_eof()
                if (failure := self._protocol.handshake_exc) is not None:
                    if isinstance(failure, InvalidStatus) and is_refusal(status := failure.response.status_code):
                        raise Refused(f"HTTP {status}")
                    raise ConnectionError(str(failure)) from failure
                events = self._protocol.events_received()
                if events and isinstance(events[0], Response):
                    self._early = events[1:]
                    break
                if not data:
                    raise ConnectionError("the head closed the connection during the handshake")
            self.sock.setblocking(False)
        except BaseException:
            self.sock.close()
            raise
        self.address = str(self.sock.getsockname()[0])
        self._unsent = bytearray()

    def put(self, data: bytes) -> None:
        try:
            self._protocol.send_binary(data)
        except InvalidState as error:  # the head is closing it
            raise ConnectionError(str(error)) from error
        self.push()

    def push(self) -> None:
        """Send what can be sent now."""
        for part in self._protocol.data_to_send():
            self._unsent += part
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def take(self) -> list[bytes]:
        """The messages that have arrived.

        Raises:
            ConnectionError: it is closed; messages that came before were given by earlier calls.
        """
        try:
            data = self.sock.recv(262144)
        except BlockingIOError:
            data = None
        if data is not None:
            self._protocol.receive_data(data) if data else self._protocol.receive_eof()
        events, self._early = [*self._early, *self._protocol.events_received()], []
        self.push()
        found = [bytes(e.data) for e in events if isinstance(e, Frame) and e.opcode is Opcode.BINARY]
        closed = data == b"" or any(isinstance(e, Frame) and e.opcode is Opcode.CLOSE for e in events)
        if closed and not found:
            raise ConnectionError("the head closed the connection")
        if closed:
            self._early = [e for e in events if isinstance(e, Frame) and e.opcode is Opcode.CLOSE]
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError, InvalidState):  # it may be closed already, from either side
            self._protocol.send_close()
            self.push()
        self.sock.close()
