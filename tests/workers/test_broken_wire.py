"""A wire that is left while messages are pending, and the sockets of the process that are not its own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.waiting import WAIT_S, wait_until
from tests.workers import static_team
from tests.workers.processes import Seat
from tests.workers.static_team import Place, train_on
from unisono.core.errors import PeerLost
from unisono.core.plan import plan
from unisono.engine.exchange import Share, combine
from unisono.engine.exchange.flat import FlatLayout
from unisono.engine.exchange.network import Network
from unisono.engine.exchange.sockets import Port, shut, tcp_sockets
from unisono.engine.exchange.wire import release_abandoned

NUM_LEAVES = 3
_held: list[Any] = []


def _leave(seat: Seat, place: Place) -> int:
    """Ranks 0 and 1 wait for messages of each other and of rank 2, which does nothing, and leave their group."""
    static_team.TIMEOUT_S = 10 * WAIT_S  # of gloo, too: whoever waits for that fails this test
    exchange = place.exchange()
    assert isinstance(exchange, Network)
    exchange.all_gather(b"here")
    layout = FlatLayout([("p", torch.zeros(1 << 18))], [])
    exchange.prepare(layout, [])
    _held.append(exchange)
    if seat.rank == 2:
        return 0
    nodes = plan(seat.size, NUM_LEAVES).nodes
    slots = {node: exchange.slot() for node in nodes[seat.rank]}
    lost: list[Exception] = []

    def sum_up() -> None:
        try:
            combine(exchange, Share(NUM_LEAVES, nodes, slots), b"")
        except PeerLost as error:
            lost.append(error)

    working = threading.Thread(target=sum_up)
    working.start()
    wire = exchange.wire
    # The other rank may have left before this one has looked: then this one has lost it.
    wait_until(lambda: bool(lost) or any(not each.is_completed() for each in wire._pending), "a message is waited for")
    exchange.interrupt(PeerLost("w2 is lost"))
    working.join()
    exchange.close()
    wait_until(lambda: not release_abandoned(), "the operations of the group end, and with them its memory")
    return len(lost)


def test_a_broken_wire_keeps_its_memory_no_longer_than_its_connections_need_to_end() -> None:
    """Also where the lost member's machine says nothing at all, so that its connections stay open."""
    assert train_on("gloo", 3, _leave) == [1, 1, 0]


@pytest.fixture
def default_timeout() -> Iterator[None]:
    socket.setdefaulttimeout(30.0)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_sockets_of_the_script_are_left_as_they_are() -> None:
    """A socket that Python makes of a descriptor does not block where a default timeout is set; nor do its copies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            for each in (server, one, other):
                each.setblocking(True)
            Port().opened_by(lambda: None)
            found = {each.descriptor: each for each in tcp_sockets().values()}
            assert all(os.get_blocking(each.fileno()) for each in (server, one, other))
            assert found[server.fileno()].listens
            assert found[one.fileno()].there == found[other.fileno()].here == server.getsockname()


def test_an_ended_connection_wakes_both_ends_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(2)]
        inode = os.fstat(pairs[0][0].fileno()).st_ino
        shut({inode: tcp_sockets()[inode], inode + 1: tcp_sockets()[inode]})
        assert [one.recv(1) for one in pairs[0]] == [b"", b""]
        pairs[1][0].sendall(b"x")
        assert pairs[1][1].recv(1) == b"x"
        for one in (*pairs[0], *pairs[1]):
            one.close()
