"""What a member was blocked by is told apart by when the others arrived, and by how busy the links were."""

from __future__ import annotations

import socket
import struct

import pytest

from unisono.exchange.connections import Connections, Counts, connections_since
from unisono.exchange.meter import Meter, told_apart
from unisono.exchange.sockets import tcp_sockets
from unisono.exchange.spent import Carried, Spent

APPROXIMATELY = pytest.approx


def test_whoever_arrived_early_has_waited_for_the_last() -> None:
    """Rank 1 arrived 0.3 s after rank 0 and 0.1 s after rank 2; what followed took 0.05 s."""
    since = [0.35, 0.05, 0.15]
    idle = [0.05] * 3
    assert told_apart(0.35, since, idle, 0, 0.35) == (1, APPROXIMATELY(0.3), APPROXIMATELY(0.05))
    assert told_apart(0.15, since, idle, 2, 0.15) == (1, APPROXIMATELY(0.1), APPROXIMATELY(0.05))
    _, waiting, network = told_apart(0.05, since, idle, 1, 0.05)
    assert (waiting, network) == (0.0, APPROXIMATELY(0.05))


def test_while_its_own_links_were_busy_a_member_did_not_wait() -> None:
    """The last one came 1 s after it, but what it had sent took 3 s."""
    assert told_apart(3.0, [3.0, 2.0], [3.0, 0.1], 0, 3.0) == (1, APPROXIMATELY(0.1), APPROXIMATELY(2.9))


def test_where_links_were_idle_members_were_adding_up() -> None:
    _, waiting, network = told_apart(1.0, [1.0, 1.0], [0.1, 0.1], 0, 1.0)
    assert (waiting, network) == (0.0, APPROXIMATELY(0.104))


def test_without_counts_of_the_kernel_all_that_is_not_waiting_is_the_network() -> None:
    assert told_apart(1.0, [1.0, 0.4], [-1.0, -1.0], 0, 1.0) == (1, APPROXIMATELY(0.6), APPROXIMATELY(0.4))


def test_nobody_waits_longer_than_it_was_blocked() -> None:
    assert told_apart(5.0, [5.0, 0.0], [0.0, 0.0], 0, 0.2) == (1, APPROXIMATELY(0.2), 0.0)


def test_alone_nobody_is_waited_for() -> None:
    meter = Meter(0)
    meter.open()
    meter.arrive(0)
    assert meter.close([meter.word()], [0]) == Spent()


def test_the_queue_before_a_vote_counts_as_if_it_were_over() -> None:
    """Half of what was sent is confirmed after 0.4 s, so the vote arrives 0.4 s later."""

    class Link(Connections):
        counts = Counts(0.0, 0, 0)

        @property
        def is_known(self) -> bool:
            return True

        def read(self) -> dict[int, Counts]:
            return {1: self.counts}

    link, late = Link(), Meter(1)
    own = Meter(0)
    own.connections = link
    own.open()
    own.arrive(4)
    late.open()
    late.arrive(7)
    link.counts = Counts(0.4, 1000, 1000)
    since, busy, latest = struct.unpack("<ffi", own.word())
    assert (busy, latest) == (APPROXIMATELY(0.8), 4)
    assert since > 0.4
    spent = own.close([own.word(), late.word()], [4, 7])
    assert spent.links == {7: Carried(0.4, 1000)}
    assert spent.overlap_s == 0.0


def test_what_is_sent_before_the_arrival_overlaps() -> None:
    spent = Spent({3: 0.5}, 0.1, 0.2, {1: Carried(0.3, 10)}).plus(
        Spent({3: 0.5, 2: 0.7}, 0.1, 0.1, {1: Carried(0.1, 5)})
    )
    assert spent.longest_wait() == (3, 1.0)
    assert spent.busiest_link() == (1, Carried(0.4, 15))
    assert (spent.waiting_s, spent.network_s, spent.overlap_s) == (APPROXIMATELY(1.7), 0.2, APPROXIMATELY(0.3))
    assert Spent().longest_wait() == (-1, 0.0)
    assert Spent({-1: 2.0}).longest_wait() == (-1, 0.0)


def test_connections_are_told_apart_by_the_address_of_the_other_member() -> None:
    before = tcp_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as own, server.accept()[0] as other:
            found = connections_since(before, ["192.0.2.1", "127.0.0.1"], 0)
            assert found.is_known
            own.sendall(b"x" * 4096)
            assert len(other.recv(4096, socket.MSG_WAITALL)) == 4096
            assert sum(counts.nbytes + counts.queued for counts in found.read().values()) >= 4096
            assert not connections_since(before, ["192.0.2.1", "192.0.2.2"], 0).is_known
        assert found.read() == {1: Counts(0.0, 0, 0)}  # they are closed
