"""TLS of a client without a socket: bytes in, bytes out, for a connection that others read and write."""

from __future__ import annotations

import ssl
from collections.abc import Callable

__all__ = ["Clear", "Sealed"]


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
