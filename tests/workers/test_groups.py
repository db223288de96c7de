"""The groups that cross the network: who is in one has the run's secret, and its port is open only while it forms."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.waiting import WAIT_S
from unisono.core.errors import PeerLost
from unisono.engine.exchange import gloo
from unisono.engine.exchange import wire as wires
from unisono.engine.exchange.sockets import Port, tcp_sockets
from unisono.engine.exchange.wire import Wire

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
DATA = b"a gradient that is nobody's business"
SEQUENCE_NUMBERS = range(10)
"""gloo counts the connections of a process, and takes whoever names the next number for the member that should come."""
ATTEMPTS = 40
"""Of two members the one with the lower address connects to the other, and ports are drawn: half of them succeed."""


@pytest.fixture
def connect() -> Iterator[Callable[..., list[Any]]]:
    """Connect two members with these secrets, let them gather, and return what each has got, or its error."""
    opened: list[Wire] = []

    def go(*secrets: bytes) -> list[Any]:
        store = dist.HashStore()
        found: list[Any] = [None] * len(secrets)
        for rank, secret in enumerate(secrets):
            names = [f"w{each}" for each in range(len(secrets))]
            opened.append(
                Wire(
                    *(store, rank, len(secrets)),
                    device=CPU,
                    address="127.0.0.1",
                    timeout_s=WAIT_S,
                    names=names,
                    secret=secret,
                )
            )

        group = opened[-len(secrets) :]

        def gather(rank: int) -> None:
            try:
                found[rank] = group[rank].all_gather_equal(DATA)
            except PeerLost as error:
                found[rank] = error

        threads = [
            threading.Thread(target=gather, args=(rank,), name=f"gathers-{rank}") for rank in range(len(secrets))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return found

    yield go
    for each in opened:
        each.close()


def ports() -> set[int]:
    """Where gloo listens in this process."""
    return {each.here[1] for each in tcp_sockets().values() if each.listens}


def test_members_of_one_run_are_connected(connect: Callable[..., list[Any]]) -> None:
    assert connect(b"secret", b"secret", b"secret") == [[DATA] * 3] * 3


def test_who_has_another_secret_is_named_and_gets_nothing(connect: Callable[..., list[Any]]) -> None:
    own, another = connect(b"secret", b"another")
    for error, name in ((own, "w1"), (another, "w0")):
        assert f"what answers as {name} has not proved that it belongs to this run" in str(error)


def test_a_member_proves_itself_to_one_other_in_one_direction_once() -> None:
    """What a stranger hears on one connection, now or earlier, is of no use to it on another."""
    codes = {
        gloo.code(b"s", sender, receiver, nonce)
        for sender in (0, 1, 11)
        for receiver in (0, 1)
        for nonce in (b"a", b"b")
    }
    assert len(codes) == 12
    assert gloo.code(b"s", 0, 1, b"a") == gloo.code(b"s", 0, 1, b"a") != gloo.code(b"t", 0, 1, b"a")


def test_nobody_can_connect_when_a_group_is_formed(connect: Callable[..., list[Any]]) -> None:
    """Each connection would cost the worker an open file, and gloo ends a process that has no more."""
    before = ports()
    assert connect(b"secret", b"secret") == [[DATA] * 2] * 2
    opened = ports() - before
    assert len(opened) == 2
    for port in opened:
        with pytest.raises(OSError, match=r"timed out|refused"):
            socket.create_connection(("127.0.0.1", port), timeout=0.2)


def test_a_stranger_that_comes_before_a_member_gets_nothing(
    connect: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the member's place in the group, for gloo; the members notice before anything counts."""
    monkeypatch.setattr(gloo, "PROOF_S", 1.0)
    listens, may_come = threading.Event(), threading.Event()
    make, opened_by = gloo.make_group, Port.opened_by

    def late(store: dist.Store, rank: int, *arguments: Any) -> Any:
        if rank == 0:
            assert may_come.wait(WAIT_S)
        return make(store, rank, *arguments)

    def noted(port: Port, open_it: Callable[[], Any]) -> Any:
        device = opened_by(port, open_it)
        listens.set()
        return device

    monkeypatch.setattr(wires, "make_group", late)
    monkeypatch.setattr(Port, "opened_by", noted)
    for _ in range(ATTEMPTS):
        listens.clear()
        may_come.clear()
        strangers: list[socket.socket] = []
        thread = threading.Thread(target=take_places, args=(ports(), listens, may_come, strangers), name="stranger")
        thread.start()
        members = connect(b"secret", b"secret")
        thread.join(WAIT_S)
        if heard := b"".join(map(unread, strangers)):
            break
        assert members == [[DATA] * 2] * 2
    assert heard, "no connection was taken for that of a member"
    assert all(isinstance(found, PeerLost) for found in members)
    assert "not all of 2 members have proved within 1 s that they belong to this run" in f"{members[0]}{members[1]}"
    assert DATA not in heard


def take_places(
    before: set[int], listens: threading.Event, may_come: threading.Event, strangers: list[socket.socket]
) -> None:
    """Connect to the port that was not there before, in place of everybody who may be meant to."""
    assert listens.wait(WAIT_S)
    (port,) = ports() - before
    for number in SEQUENCE_NUMBERS:
        strangers.append(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
        strangers[-1].sendall(struct.pack("<q", number))
    may_come.set()


def unread(connection: socket.socket) -> bytes:
    """What has arrived at a connection, which is closed."""
    found = b""
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        while data := connection.recv(65536):
            found += data
    return found
