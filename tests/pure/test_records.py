"""TLS without a socket: however the bytes are cut on their way, and whatever else arrives."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.cluster.trust.certificate import Untrusted, client_context, derived, server_context
from unisono.cluster.worker.link import Sealed
from unisono.system.lifetime import Memory

TOKEN = "token"


class Server:
    """The other end."""

    def __init__(self) -> None:
        with Memory("unisono-test", derived(TOKEN).pem) as memory:
            context = server_context(memory.path)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.heard = b""
        self._is_open = False

    def receive(self, data: bytes) -> None:
        self.incoming.write(data)
        try:
            if not self._is_open:
                self.tls.do_handshake()
                self._is_open = True
            while part := self.tls.read(65536):
                self.heard += part
        except ssl.SSLWantReadError:
            pass


def trust(certificate: bytes | None) -> None:
    assert certificate


def doubt(certificate: bytes | None) -> None:
    raise Untrusted("another one")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=40_000), max_size=5), st.lists(st.integers(1, 5000), min_size=1))
def test_bytes_arrive_as_they_were_sent(said: list[bytes], cuts: list[int]) -> None:
    client, server, found = Sealed(client_context(), trust), Server(), b""
    server.receive(client.send(b""))
    turn = 0

    def deliver() -> bytes:
        nonlocal turn
        data, got = server.outgoing.read(), b""
        while data:
            cut = cuts[turn % len(cuts)]
            turn += 1
            got += client.receive(data[:cut])
            data = data[cut:]
            server.receive(client.send(b""))
        return got

    while not client.is_ready:
        deliver()
    for message in said:
        server.receive(client.send(message))
        if message:
            server.tls.write(message)
        found += deliver()
    assert found == server.heard == b"".join(said)


def test_what_is_not_trusted_gets_no_answer() -> None:
    """Not even the end of the handshake: the other end does not learn whether it would have been believed."""
    client, server = Sealed(client_context(), doubt), Server()
    server.receive(client.send(b""))
    with pytest.raises(Untrusted):
        client.receive(server.outgoing.read())
    assert not client.is_ready
    assert server.heard == b""


@given(st.binary(min_size=16))
def test_what_is_no_tls_is_a_broken_connection(data: bytes) -> None:
    client = Sealed(client_context(), trust)
    client.send(b"")
    with contextlib.suppress(ConnectionError):  # and no other error
        assert client.receive(data) == b""
    assert not client.is_ready


def test_a_record_that_was_changed_on_the_way_ends_the_connection() -> None:
    client, server = Sealed(client_context(), trust), Server()
    server.receive(client.send(b""))
    client.receive(server.outgoing.read())
    server.receive(client.send(b""))
    client.receive(server.outgoing.read())
    server.tls.write(b"as it was sent")
    record = bytearray(server.outgoing.read())
    record[-1] ^= 1
    with pytest.raises(ConnectionError, match="the TLS connection failed"):
        client.receive(bytes(record))
