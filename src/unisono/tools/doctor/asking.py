"""The doctor's program on a machine: ``python -m unisono.tools.doctor.asking`` (`unisono.tools.doctor.remote`).

It reads orders from its standard input, one JSON object a line, and ends with it. Answers are lines as well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.cluster.machine.headprocess import at_first_free
from unisono.tools.doctor.facts import MachineFacts, Scope, find_out

__all__ = ["MARK", "ProbeReply", "ProbeRequest", "Server", "carry_out", "measure"]

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
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        self._socket = at_first_free(ports or (0, 0), lambda port: socket.create_server(("", port), family=family))
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


MARK: Final = "unisono-doctor "
"""Begins each answer: the start-up files of a shell may print, too."""


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do: one of "facts", "clock", "serve", "measure", "make", "see", "remove"."""

    what: str
    asked: Scope = Scope()
    addresses: list[str] = []
    port: int = 0
    word: str = ""
    file: str = ""


class ProbeReply(msgspec.Struct, frozen=True, kw_only=True):
    facts: MachineFacts | None = None
    time: float = 0.0
    port: int = 0
    word: str = ""
    address: str = ""
    latency_s: float = 0.0
    bandwidth: float = 0.0
    is_there: bool = False
    error: str = ""


def carry_out(order: ProbeRequest) -> ProbeReply:
    """Carry out an order on this machine; an error is an answer, too."""
    try:
        return ProbeReply(**_DOING[order.what](order))
    except (OSError, ValueError) as error:
        return ProbeReply(error=str(error) or type(error).__name__)


def _serve(order: ProbeRequest) -> dict[str, Any]:
    server = Server(order.asked.ports, ipv6=order.asked.ipv6)
    return {"port": server.port, "word": server.word}


def _measure(order: ProbeRequest) -> dict[str, Any]:
    why = "the machine has no address that others can reach"
    for address in order.addresses:
        try:
            latency_s, bandwidth = measure(address, order.port, order.word)
        except OSError as error:
            why = f"{address} port {order.port}: {error.strerror or error}"
        else:
            return {"address": address, "latency_s": latency_s, "bandwidth": bandwidth}
    raise OSError(why)


def _make(order: ProbeRequest) -> dict[str, Any]:
    os.close(os.open(order.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return {"is_there": True}


def _see(order: ProbeRequest) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        os.listdir(Path(order.file).parent)  # a network file system may remember that the file was not there
    return {"is_there": os.path.exists(order.file)}


def _remove(order: ProbeRequest) -> dict[str, Any]:
    os.unlink(order.file)
    return {}


_DOING: Final[dict[str, Callable[[ProbeRequest], dict[str, Any]]]] = {
    "facts": lambda order: {"facts": find_out(order.asked)},
    "clock": lambda order: {"time": time.time()},
    "serve": _serve,
    "measure": _measure,
    "make": _make,
    "see": _see,
    "remove": _remove,
}


if __name__ == "__main__":
    for line in sys.stdin:
        answer = carry_out(msgspec.json.decode(line, type=ProbeRequest))
        print(MARK + msgspec.json.encode(answer).decode(), flush=True)
