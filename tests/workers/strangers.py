"""What strangers do to a head, and those who have the token and talk nonsense: `ATTACKS`, by name."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from tests.waiting import WAIT_S
from unisono.cli.reach import NotGoing, ask_status
from unisono.cluster.head.door import MAX_MESSAGE_BYTES
from unisono.cluster.trust.certificate import client_context
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.core.messages import Hello, MemberInfo, encode

__all__ = ["ATTACKS", "recorded"]

TIMES = 20


@contextlib.contextmanager
def dialled(to: Invitation) -> Iterator[socket.socket]:
    """A TCP connection to the head."""
    head = HeadUrl.parse(to.url)
    with socket.create_connection((head.host, head.port), timeout=WAIT_S) as connection:
        yield connection


@contextlib.contextmanager
def sealed(to: Invitation) -> Iterator[ssl.SSLSocket]:
    """A TLS connection to the head; strangers do not ask whose certificate it is."""
    with dialled(to) as connection, client_context().wrap_socket(connection) as secure:
        yield secure


def answer(connection: socket.socket) -> bytes:
    """What the head says until it closes the connection."""
    found = b""
    with contextlib.suppress(OSError):  # it may reset the connection
        while part := connection.recv(65536):
            found += part
    return found


def wrong_token(to: Invitation) -> None:
    for header in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic \xff\r\n", f"X: {to.token}\r\n"):
        for path in ("/", "/status"):
            with sealed(to) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode("latin-1"))
                assert b"401" in answer(connection).partition(b"\r\n")[0]


def no_tls(to: Invitation) -> None:
    for said in (b"GET /status HTTP/1.1\r\n\r\n", b"\x00" * 4096, os.urandom(4096), b"\x16\x03\x01\xff\xff"):
        with dialled(to) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert b"HTTP/1.1 200" not in answer(connection)


def no_http(to: Invitation) -> None:
    for said in (b"\x00" * 4096, b"GET / HTTP/1.1\r\nA" + b"a" * 100_000, b"A: b\r\n" * 10_000):
        with sealed(to) as connection:
            with contextlib.suppress(OSError):  # it does not listen to the end
                connection.sendall(said)
            connection.settimeout(0.1)
            answer(connection)


def request_without_end(to: Invitation) -> None:
    with sealed(to) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(b"x" * 65536)


def nonsense_with_the_token(to: Invitation) -> None:
    """Whoever has the token is trusted; but an old version, or a mistake, must not end the run either."""
    info = MemberInfo(worker_id="w7", host="lab", pid=1, device="cpu")
    binary = (b"", b"\xff" * 100, b"\x81\xa4type\xa1x", encode(Hello(info=info, fingerprint={})), b"x" * (1 << 20))
    too_long = b"x" * (MAX_MESSAGE_BYTES + 1)
    malformed = bytes([0x8F, 0x00]), Frame(Opcode.TEXT, b"\xff").serialize(mask=False)
    header = {"Authorization": f"Bearer {to.token}"}
    url = HeadUrl.parse(to.url).place
    for said in (*binary, too_long, "text", *malformed):
        with contextlib.suppress(WebSocketException, OSError):
            with connect(
                url, ssl=client_context(), additional_headers=header, proxy=None, close_timeout=1
            ) as connection:
                if said in malformed:
                    connection.socket.sendall(said)
                else:
                    connection.send(said)
                connection.recv(WAIT_S)


def frames(opcode: Opcode, data: bytes, number: int) -> bytes:
    return b"".join(Frame(opcode, data).serialize(mask=True) for _ in range(number))


FLOODS = {
    "questions": frames(Opcode.TEXT, b'{"id": 1, "get": "overview"}', 20_000),
    "empty messages": frames(Opcode.TEXT, b"", 100_000),
    "pings": frames(Opcode.PING, b"", 100_000),
    "pieces of a message without end": Frame(Opcode.TEXT, b"x", fin=False).serialize(mask=True)
    + b"".join(Frame(Opcode.CONT, b"x", fin=False).serialize(mask=True) for _ in range(50_000)),
    "a huge message": Frame(Opcode.TEXT, b"x" * (8 << 20)).serialize(mask=True),
    "the beginning of a huger one": b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00",
    "no frames": os.urandom(1 << 20),
}
"""What a viewer may send that is no question."""


def asks_to_watch(to: Invitation) -> bytes:
    """The request of somebody who has the line for watching."""
    return (
        f"GET /watch HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {to.for_looking.token}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()


def floods_of_viewers(to: Invitation) -> None:
    for said in FLOODS.values():
        with sealed(to) as connection:
            connection.sendall(asks_to_watch(to))
            assert connection.recv(12) == b"HTTP/1.1 101"
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # it is not all taken
                connection.sendall(said)
            assert ask_status(to)["workers"]


def more_viewers_than_there_is_room_for(to: Invitation) -> None:
    """They read nothing, and some send half a question."""
    with contextlib.ExitStack() as held:
        answers = []
        for number in range(80):
            connection = held.enter_context(sealed(to))
            connection.sendall(asks_to_watch(to))
            answers.append(connection.recv(12))
            with contextlib.suppress(OSError):
                connection.sendall(b"\x81\xfe\x10\x00"[: number % 5])
        assert {b"HTTP/1.1 101", b"HTTP/1.1 429"} == set(answers)
        assert ask_status(to)["workers"], "a command finds room"


def looks_with_a_wish_for_more(to: Invitation) -> None:
    reader = to.for_looking.token
    for path in ("/", f"/?token={reader}", "/watch/../", "/token", "/../token"):
        with sealed(to) as connection:
            request = asks_to_watch(to).decode().replace("/watch", path, 1)
            connection.sendall(request.encode())
            assert answer(connection).partition(b"\r\n")[0].split()[1] in (b"403", b"404")


ATTACKS: dict[str, Callable[[Invitation], None]] = {
    "a wrong token": wrong_token,
    "no TLS": no_tls,
    "no HTTP": no_http,
    "a request without end": request_without_end,
    "nonsense, with the token": nonsense_with_the_token,
    "more than looking, with the token for looking": looks_with_a_wish_for_more,
    "viewers that flood the head": floods_of_viewers,
    "more viewers than there is room for": more_viewers_than_there_is_room_for,
}


@contextlib.contextmanager
def flood(to: Invitation, number: int, said: bytes, *, with_tls: bool) -> Iterator[None]:
    """Connections that say so much, and then nothing more."""
    with contextlib.ExitStack() as held:
        for _ in range(number):
            with contextlib.suppress(OSError):  # it has been sent away
                connection = held.enter_context(sealed(to) if with_tls else dialled(to))
                connection.sendall(said)
        yield


def recorded(to: Invitation) -> bytes:
    """All that a client with the token says to the head, as somebody on the path can record it."""
    head = HeadUrl.parse(to.url)
    found = []
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def copy(source: socket.socket, sink: socket.socket, notes: list[bytes]) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    notes.append(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            client, _ = relay.accept()
            with client, socket.create_connection((head.host, head.port)) as server:
                back = threading.Thread(target=copy, args=(server, client, []), name="unisono-test-relay-back")
                back.start()
                copy(client, server, found)
                back.join(WAIT_S)

        thread = threading.Thread(target=serve, name="unisono-test-relay")
        thread.start()
        through = HeadUrl("127.0.0.1", relay.getsockname()[1], head.is_secure, head.fingerprint)
        with contextlib.suppress(NotGoing):
            ask_status(Invitation(str(through), to.token))
        thread.join(WAIT_S)
    return b"".join(found)
