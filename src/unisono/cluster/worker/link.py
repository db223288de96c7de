"""Client side of a WebSocket connection to the head, without a thread and without a loop of its own.

A worker drives it by a thread with a selector (`unisono.cluster.worker.member`), an agent by its event loop
(`unisono.cluster.machine.head_connection`), a command waits for its one answer (`unisono.cli.reach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import select
import socket
import ssl
import sys
import termios
from collections.abc import Callable

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState, InvalidStatus, InvalidURI
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from unisono.cluster.trust.certificate import check, client_context
from unisono.cluster.trust.invitation import HeadUrl
from unisono.cluster.worker.packed import unpack
from unisono.core.errors import UnisonoError, UsageError
from unisono.core.messages import is_refusal
from unisono.system.lifetime import end_when_silent

__all__ = ["Clear", "Link", "Refused", "Sealed", "answer_to", "host_and_port", "open_link"]


class Clear:
    """A connection without TLS: bytes are sent and received as they are."""

    is_ready = True

    def receive(self, data: bytes) -> bytes:
        return data

    def send(self, data: bytes) -> bytes:
        return data


class Sealed:
    """A TLS connection.

    Args:
        context: its settings.
        check: receives the certificate of the other end (DER), and raises if it is not the right one. Called before
            anything is sent to the other end but its part of the handshake.
    """

    def __init__(self, context: ssl.SSLContext, check: Callable[[bytes | None], None]) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self._check = check
        self.is_ready = False
        """The other end is known: data may be sent to it."""
        self._go_on()

    def receive(self, data: bytes) -> bytes:
        """Return what these bytes say; nothing, where the rest of it is still to come.

        Raises:
            ConnectionError: the other end is not who it should be, or does not keep to the protocol.
        """
        self._incoming.write(data)
        try:
            if not self.is_ready:
                self._go_on()
            return self._read() if self.is_ready else b""
        except ssl.SSLError as error:
            raise ConnectionError(f"the TLS connection failed: {error.reason or error}") from error

    def send(self, data: bytes) -> bytes:
        """Return the bytes that say this, and what the protocol has to say by itself."""
        if data:
            self._tls.write(data)
        return self._outgoing.read()

    def _go_on(self) -> None:
        """Go on with the handshake."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._check(self._tls.getpeercert(binary_form=True))
        self.is_ready = True

    def _read(self) -> bytes:
        found = bytearray()
        try:
            while part := self._tls.read(65536):
                found += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # it sends no more, and then closes the connection
            pass
        return bytes(found)


CONNECT_TIMEOUT_S = 5.0
MAX_BYTES = 262144  # received at once
MAX_WHY = 200


def _silent() -> logging.Logger:
    """Return a logger that drops everything: where a script logs all that there is, websockets would log the token."""
    logger = logging.getLogger("unisono.cluster.worker.link.websockets")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    logger.setLevel(logging.CRITICAL)
    return logger


_SILENT = _silent()


class Refused(UnisonoError):
    """The head refuses this connection, now and later: the token is not the run's."""


class Link:
    """One WebSocket connection to the head.

    Args:
        sock: connected to the head. It is non-blocking from when the connection `is_open`.
        url: with ``wss://``, the head proves that it knows the token before the token is sent to it.
        path: at which the head takes such a connection.
        kind: of messages, in both directions; those of another kind are dropped.

    Raises:
        Refused: the head refuses the connection. OSError: there is no connection, or it is lost, or the process that
            answers is not the head (`unisono.cluster.trust.certificate.Untrusted`); also raised by all methods but
            `close`.
    """

    def __init__(
        self, sock: socket.socket, url: str, token: str, path: str = "/", kind: Opcode = Opcode.BINARY
    ) -> None:
        self.sock = sock
        self._kind = kind
        self.is_open = False
        """The head has agreed to the connection: messages may be sent."""
        head = _parsed(url)
        # The head is trusted; its state may be long.
        self._protocol = ClientProtocol(parse_uri(head.place + path), max_size=None, logger=_SILENT)
        self._records: Clear | Sealed = Clear()
        if head.is_secure:
            self._records = Sealed(client_context(), lambda certificate: check(certificate, head, token))
        self._unsent = bytearray()
        self._parts: list[bytes] = []
        """Of a message that comes in several frames."""
        self._early: list[object] = []
        self._is_at_end = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_silent(sock)
        self.address = str(sock.getsockname()[0])
        request = self._protocol.connect()
        request.headers["Authorization"] = f"Bearer {token}"
        self._protocol.send_request(request)
        self.push()

    @classmethod
    def dial(
        cls,
        url: str,
        token: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        path: str = "/",
        kind: Opcode = Opcode.BINARY,
    ) -> Link:
        """Connect; blocks until the connection is open."""
        sock = socket.create_connection(host_and_port(url), timeout=timeout_s)
        try:
            link = cls(sock, url, token, path, kind)
            while not link.is_open:
                link.feed(sock.recv(MAX_BYTES))
            return link
        except BaseException:
            sock.close()
            raise

    def feed(self, data: bytes) -> None:
        """Process received data; no data means that the other end has closed."""
        if self._is_at_end:
            return
        if data:
            self._protocol.receive_data(self._records.receive(data))
        else:
            self._is_at_end = True
            self._protocol.receive_eof()
        if self.is_open:
            return
        self.push()
        if (failure := self._protocol.handshake_exc) is not None:
            if isinstance(failure, InvalidStatus) and is_refusal(status := failure.response.status_code):
                raise Refused(f"HTTP {status}{_why(failure.response)}")
            raise ConnectionError(str(failure)) from failure
        events = self._protocol.events_received()
        if events and isinstance(events[0], Response):
            self._early = list(events[1:])
            self.is_open = True
            self.sock.setblocking(False)
        elif not data:
            raise ConnectionError("the head closed the connection during the handshake")

    def put(self, data: bytes) -> None:
        """Send a message. Data that cannot be sent now is sent by `push`."""
        try:
            if self._kind is Opcode.TEXT:
                self._protocol.send_text(data)
            else:
                self._protocol.send_binary(data)
        except InvalidState as error:  # the head is closing it
            raise ConnectionError(str(error)) from error
        self.push()

    def push(self) -> None:
        """Send all data that can be sent now."""
        # What is said before the other end is known stays in the protocol.
        parts = self._protocol.data_to_send() if self._records.is_ready else []
        self._unsent += self._records.send(b"".join(parts))
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    @property
    def is_acknowledged(self) -> bool:
        """Return whether the other machine has received all that was sent, where the system can say."""
        if self._unsent:
            return False
        try:
            return not int.from_bytes(fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return True

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def take(self) -> list[bytes]:
        """Return the messages that have arrived.

        Raises:
            ConnectionError: the connection is closed; earlier calls have returned all messages.
        """
        with contextlib.suppress(BlockingIOError):
            self.feed(self.sock.recv(MAX_BYTES))
        events, self._early = [*self._early, *self._protocol.events_received()], []
        self.push()
        found = [data for e in events if isinstance(e, Frame) and (data := self._message(e)) is not None]
        closed = self._is_at_end or any(isinstance(e, Frame) and e.opcode is Opcode.CLOSE for e in events)
        if closed and not found:
            raise ConnectionError("the head closed the connection")
        if closed:
            self._early = [e for e in events if isinstance(e, Frame) and e.opcode is Opcode.CLOSE]
        return found

    def _message(self, frame: Frame) -> bytes | None:
        """Return the message that ends with this frame; None: it does not end yet, or is none for us."""
        if frame.opcode is self._kind:
            self._parts = [bytes(frame.data)]
        elif frame.opcode is Opcode.CONT and self._parts:
            self._parts.append(bytes(frame.data))
        else:
            return None
        if not frame.fin:
            return None
        parts, self._parts = self._parts, []
        return unpack(b"".join(parts))

    def wait(self, timeout_s: float) -> list[bytes]:
        """Return the messages that have arrived; blocks until there is one.

        Raises:
            TimeoutError: there was none in time.
        """
        while not (found := self.take()):
            if not select.select([self.sock], [], [], timeout_s)[0]:
                raise TimeoutError(f"the head has not answered for {timeout_s:.0f} s")
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError, InvalidState):  # it may be closed already, from either side
            self._protocol.send_close()
            self.push()
        self.sock.close()


def _why(response: Response) -> str:
    """Return the first line of a refusal, for a sentence."""
    text = (response.body or b"")[:MAX_WHY].decode(errors="replace").partition("\n")[0]
    return f" ({text})" if text and text.isprintable() else ""


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of a head's URL.

    Raises:
        ConnectionError: the URL is malformed.
    """
    head = _parsed(url)
    return head.host, head.port


def _parsed(url: str) -> HeadUrl:
    try:
        head = HeadUrl.parse(url)
        parse_uri(head.place)
    except (UsageError, InvalidURI, ValueError) as error:
        raise ConnectionError(str(error)) from error
    return head


async def open_link(url: str, token: str, open_s: float) -> Link:
    """Connect to a head.

    Raises:
        Refused, OSError: as `Link`; TimeoutError: no answer within ``open_s``.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(open_s):
            sock = await _connect(*host_and_port(url))
            try:
                link = Link(sock, url, token)
                while not link.is_open:
                    link.feed(await loop.sock_recv(sock, MAX_BYTES))
                return link
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise TimeoutError(f"no answer within {open_s:.0f} s") from None


async def answer_to(message: bytes, link: Link, timeout_s: float) -> bytes:
    """Send one message to a head; returns the first answer.

    Raises:
        OSError: the connection broke; TimeoutError: no answer within ``timeout_s``.
    """
    link.put(message)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        while not (found := link.take()):
            await _readable(loop, link.sock)
    return found[0]


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def _connect(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that is connected to the first address of this host that answers."""
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name, whose look-up may take long
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure
