"""Beacon: shows other machines, before a run begins, at which of its addresses they reach this machine."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from types import TracebackType

from unisono.core.errors import UsageError

__all__ = ["Beacon"]


class Beacon:
    """Sends a fresh secret to whoever connects, while the ``with`` lasts. Who has read the secret has reached this one.

    Args:
        bind: where to listen; "": on all interfaces.
        port: 0 for any.

    Raises:
        UsageError: this port or this address is not free.
    """

    def __init__(self, bind: str, port: int) -> None:
        both = not bind and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in bind else socket.AF_INET
        try:
            self._socket = socket.create_server((bind, port), family=family, dualstack_ipv6=both)
        except (OSError, TypeError) as error:
            where = f"{bind or 'all interfaces'} port {port}"
            raise UsageError(
                f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}; use another --bind or --set "
                "port "
                "(0: any)"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.secret = secrets.token_hex(16)
        self._thread = threading.Thread(target=self._serve, name="unisono-beacon", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), connection:
                connection.sendall(self.secret.encode())

    def __enter__(self) -> Beacon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread
        self._thread.join()
        self._socket.close()
