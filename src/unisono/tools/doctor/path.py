"""Latency and bandwidth between two machines: a server for one client, and the client.

The client begins with a word that only both know; the server ends with it, and after `PATIENCE_S` in any case.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import threading
import time
from typing import Final

__all__ = ["Server", "measure"]

PATIENCE_S: Final = 20.0
STALL_S: Final = 10.0
"""A client gives up before the server does."""
NUM_PINGS: Final = 20
SECONDS: Final = 0.5
CHUNK: Final = 1 << 18
WORD_BYTES: Final = 16


class Server:
    """Waits in a thread for one client.

    Args:
        ports: first and last port that it may listen on; None: any.

    Raises:
        OSError: none of them is free.
    """

    def __init__(self, ports: tuple[int, int] | None, *, ipv6: bool = False) -> None:
        self.word = secrets.token_hex(WORD_BYTES // 2)
        self._socket = _listen(ports, socket.AF_INET6 if ipv6 else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="unisono-doctor", daemon=True).start()

    def _serve(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        with self._socket, contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE_S)
                    if _receive(connection, WORD_BYTES) == self.word.encode():
                        _answer(connection)
                        return


def _listen(ports: tuple[int, int] | None, family: socket.AddressFamily) -> socket.socket:
    failure = OSError("no port")
    for port in range(ports[0], ports[1] + 1) if ports else (0,):
        try:
            return socket.create_server(("", port), family=family)
        except OSError as error:
            failure = error
    raise failure


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(NUM_PINGS):
        connection.sendall(_receive(connection, 1))
    begun, received = time.perf_counter(), 0
    while data := connection.recv(CHUNK):
        received += len(data)
    connection.sendall(f"{received} {time.perf_counter() - begun}".encode())


def measure(address: str, port: int, word: str, timeout_s: float = 5.0) -> tuple[float, float]:
    """Return the time of a message and its answer, and bytes a second, to a `Server`.

    Raises:
        OSError: it cannot be reached.
    """
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(word.encode())
        times = []
        for _ in range(NUM_PINGS):
            begun = time.perf_counter()
            connection.sendall(b"?")
            _receive(connection, 1)
            times.append(time.perf_counter() - begun)
        data, end = bytes(CHUNK), time.perf_counter() + SECONDS
        connection.settimeout(STALL_S)
        try:
            while time.perf_counter() < end:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            received, seconds = connection.recv(256).decode().split()
        except TimeoutError:
            raise OSError(
                f"messages of a byte are answered, and then nothing for {STALL_S:.0f} s: full packets are lost on "
                "the way, as where the network carries smaller ones than the interfaces are set to (their MTU)"
            ) from None
        return statistics.median(times), int(received) / max(float(seconds), 1e-9)


def _receive(connection: socket.socket, number: int) -> bytes:
    data = b""
    while len(data) < number:
        part = connection.recv(number - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return data
