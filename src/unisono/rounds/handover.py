"""How an evaluator gets the models: from the member that has asked, over a connection of their own.

The member listens at a port of its own while the evaluation is under way, and gives its copy to whoever proves that it
holds the run's secret; it proves the same to the evaluator. All of that is done by a thread, while the member trains
on. As all that workers exchange, the models are not encrypted (docs/security.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Any, Final

import msgspec
import torch

from unisono.errors import PeerLost
from unisono.faults import point
from unisono.rounds.transfer import StateHeader
from unisono.secret import KEY_BYTES
from unisono.state.packing import Packed, unpack

__all__ = ["Handover", "fetch"]

LENGTH: Final = struct.Struct("!Q")
PROOF_S: Final = 5.0
"""Whoever connects proves itself at once."""
PIECE_BYTES: Final = 1 << 20
MOST_AT_ONCE: Final = 8
"""Connections: whoever comes beyond that is sent away, so strangers use up neither threads nor open files."""
MOST_HEADER_BYTES: Final = 1 << 28


class Handover:
    """Gives models to evaluators, until it is closed.

    Args:
        address: of this worker, where others reach it.
        secret: of the run, for this purpose.
        timeout_s: for one piece of the models.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret
        self._timeout_s = timeout_s
        self._packed: tuple[Packed, ...] = ()
        self._is_closed = False
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)

    def give(self, *packed: Packed) -> None:
        """Begin to give these states to whoever comes. Local; nothing waits for it."""
        self._packed = packed
        threading.Thread(target=self._serve, name="unisono-handover", daemon=True).start()

    def close(self) -> None:
        """Give nothing any more, and let go of the copy."""
        self._is_closed = True
        self._packed = ()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="unisono-handover", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as answered:
            answered.callback(self._room.release)
            answered.enter_context(connection)
            answered.enter_context(contextlib.suppress(OSError, PeerLost))
            if not _prove(connection, self._secret, b"member", b"evaluator"):
                return
            connection.settimeout(self._timeout_s)
            for packed in self._packed:
                self._send(connection, packed)

    def _send(self, connection: socket.socket, packed: Packed) -> None:
        header = msgspec.msgpack.encode(StateHeader.of(packed, digests=True))
        connection.sendall(LENGTH.pack(len(header)) + header)
        for tensor in packed.tensors:
            point("evaluation.giving")
            data = _bytes_of(tensor.detach().cpu().contiguous())
            for start in range(0, len(data), PIECE_BYTES):
                connection.sendall(data[start : start + PIECE_BYTES])


def fetch(address: str, port: int, secret: bytes, timeout_s: float, number: int) -> list[Any]:
    """Return so many states that a `Handover` gives.

    Raises:
        PeerLost: the other side does not answer, is another program, or was lost on the way.
    """
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            if not _prove(connection, secret, b"evaluator", b"member"):
                raise PeerLost(f"what listens at {address}:{port} has not proved that it belongs to this run")
            connection.settimeout(timeout_s)
            return [_fetch(connection) for _ in range(number)]
    except (OSError, msgspec.MsgspecError) as error:
        raise PeerLost(f"the models could not be fetched from {address}:{port}: {error}") from error


def _fetch(connection: socket.socket) -> Any:
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    if length > MOST_HEADER_BYTES:
        raise PeerLost(f"the models have a header of {length:,} bytes")
    header = msgspec.msgpack.decode(_receive(connection, length), type=StateHeader)
    tensors = header.empty()
    for tensor in tensors:
        point("evaluation.fetching")
        _receive_into(connection, _bytes_of(tensor))
    header.check(tensors)
    return unpack(header.skeleton, tensors)


def _prove(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> bool:
    """Prove that this side holds the secret; return whether the other one does."""
    connection.settimeout(PROOF_S)
    asked = secrets.token_bytes(KEY_BYTES)
    connection.sendall(asked)
    question = _receive(connection, KEY_BYTES)
    connection.sendall(hmac.digest(secret, own + question, hashlib.sha256))
    answer = _receive(connection, hashlib.sha256().digest_size)
    return hmac.compare_digest(answer, hmac.digest(secret, other + asked, hashlib.sha256))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view[:PIECE_BYTES])
        if not received:
            raise PeerLost("the connection closed before all of the models had come")
        view = view[received:]
