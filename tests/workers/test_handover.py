"""Models on their way from a member to an evaluator: the same bits, and only to those who belong to the run."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.workers.models import bits_of
from unisono.errors import PeerLost
from unisono.rounds import handover
from unisono.rounds.handover import MOST_AT_ONCE, Handover, fetch
from unisono.state.packing import Packed, pack

SECRET, OTHER = b"s" * 32, b"o" * 32
HERE = "127.0.0.1"
WAIT_S = 30.0

STATE = {
    "half": torch.randn(7, 3).bfloat16(),
    "flags": torch.tensor([True, False]),
    "numbers": torch.arange(1000),
    "one": torch.tensor(1.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "turned": torch.randn(5, 6).t(),
    "large": torch.randn(600_000),
    "words": ["a", 1, None],
}


@pytest.fixture
def giver() -> Iterator[Handover]:
    with contextlib.closing(Handover(HERE, SECRET, WAIT_S)) as found:
        yield found


def copy_of(state: Any) -> Packed:
    return pack(state)


def test_states_arrive_as_they_were_sent_each_time(giver: Handover) -> None:
    giver.give(copy_of(STATE), copy_of({"own": 3}))
    for _ in range(2):
        first, second = fetch(HERE, giver.port, SECRET, WAIT_S, 2)
        assert bits_of(first) == bits_of(STATE)
        assert second == {"own": 3}


def test_nothing_is_sent_to_who_does_not_hold_the_secret(giver: Handover) -> None:
    giver.give(copy_of(STATE))
    with pytest.raises(PeerLost, match="has not proved that it belongs to this run"):
        fetch(HERE, giver.port, OTHER, WAIT_S, 1)
    with socket.create_connection((HERE, giver.port), timeout=WAIT_S) as stranger:
        stranger.sendall(b"x" * 64)
        received = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert len(received) <= 64, "a question, and the answer to what was asked"


def test_what_answers_in_place_of_the_member_is_found_out() -> None:
    with socket.create_server((HERE, 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"q" * 32 + b"a" * 32)
                connection.recv(64)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(PeerLost, match="has not proved"):
            fetch(HERE, listener.getsockname()[1], SECRET, WAIT_S, 1)
        thread.join(WAIT_S)


def test_an_answer_is_good_for_one_side_only() -> None:
    """Whoever sends an evaluator's own question back gets an answer that proves nothing."""
    with socket.create_server((HERE, 0)) as listener:

        def mirror() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(4096):
                    connection.sendall(data)

        thread = threading.Thread(target=mirror, daemon=True)
        thread.start()
        with pytest.raises(PeerLost, match="has not proved"):
            fetch(HERE, listener.getsockname()[1], SECRET, WAIT_S, 1)
        thread.join(WAIT_S)


def test_a_member_that_is_lost_on_the_way_is_an_error(giver: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Handover, connection: socket.socket, packed: Packed) -> None:
        connection.sendall(handover.LENGTH.pack(100) + b"the beginning")

    monkeypatch.setattr(Handover, "_send", breaks)
    giver.give(copy_of(STATE))
    with pytest.raises(PeerLost, match="the connection closed before all of the models had come"):
        fetch(HERE, giver.port, SECRET, WAIT_S, 1)


def test_when_it_is_closed_nobody_listens() -> None:
    giver = Handover(HERE, SECRET, WAIT_S)
    giver.give(copy_of(STATE))
    giver.close()
    with pytest.raises(PeerLost, match="could not be fetched"):
        fetch(HERE, giver.port, SECRET, WAIT_S, 1)


def test_strangers_cannot_use_up_threads_and_open_files(giver: Handover) -> None:
    giver.give(copy_of({"own": 3}))
    before = threading.active_count()
    with contextlib.ExitStack() as strangers:
        for _ in range(4 * MOST_AT_ONCE):
            strangers.enter_context(socket.create_connection((HERE, giver.port), timeout=WAIT_S))
        last = strangers.enter_context(socket.create_connection((HERE, giver.port), timeout=WAIT_S))
        assert last.recv(1) == b"", "it is sent away at once"
        assert threading.active_count() <= before + MOST_AT_ONCE + 1
