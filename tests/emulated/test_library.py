"""Members on cards of their own, emulated, and the library that connects them: who is on which, and what goes wrong."""

from __future__ import annotations

import importlib
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.waiting import WAIT_S
from tests.workers.processes import Seat, Team
from unisono.core.errors import DeadlineExceeded, PeerLost, UsageError
from unisono.engine.exchange import wire as wires
from unisono.engine.exchange.wire import Wire

CPU = torch.device("cpu")
AGENT = ("GPU-1", "GPU-2")


def _enter(
    seat: Seat, path: str, card: str, timeout_s: float = WAIT_S, device: str = "emu:0", made: str = ""
) -> tuple[Wire, Any]:
    """Join the group; `made` fails while it is made: set first, because the wire connects in a thread of its own."""
    os.environ["EMULATED_CARD"] = card
    library = importlib.import_module("tests.emulated.library")
    library.failure.made, library.failure.hangs = made, lambda: seat.say("hangs")
    wires.CONNECT_S = WAIT_S
    store, names = dist.FileStore(path, -1), ["w4", "w7"][: seat.size]
    place = {"device": torch.device(device), "address": "127.0.0.1"}
    return Wire(store, seat.rank, seat.size, timeout_s=timeout_s, names=names, **place), library


def _meet(seat: Seat, path: str, cards: tuple[str, ...]) -> tuple[list[bytes], list[str]]:
    wire, library = _enter(seat, path, cards[seat.rank])
    found = wire.all_gather_equal(str(seat.rank).encode())
    assert wire.vote(seat.rank + 1, b"x") == (3, [b"x", b"x"])
    wire.close()
    return found, [one.connected_in for one in library.made]


@pytest.mark.parametrize(
    ("cards", "by_library"),
    [
        pytest.param(("GPU-1", "GPU-2"), True, id="each the first that its process sees"),
        pytest.param(("GPU-1@0:1:0", "GPU-2@0:2:0"), True, id="two cards"),
        pytest.param(("GPU-1", "GPU-1"), False, id="the script has named one card for both"),
        pytest.param(("MIG-1@0:1:0", "MIG-2@0:1:0"), False, id="slices of one card"),
        pytest.param(("", ""), False, id="nothing is known of them"),
    ],
)
def test_the_library_connects_members_with_a_card_each(
    cards: tuple[str, ...], by_library: bool, tmp_path: Path
) -> None:
    """It does so in the thread that forms the group: no thread of the run waits for it."""
    with Team(2, _meet, str(tmp_path / "store"), cards) as team:
        for found, connected_in in team.results():
            assert found == [b"0", b"1"]
            assert connected_in == (["unisono-connect"] if by_library else [])


def _on_other_kinds(seat: Seat, path: str) -> str:
    wire, _ = _enter(seat, path, "GPU-1", device="emu:0" if seat.rank else "cpu")
    if seat.rank == 0:
        return str(seat.hear())
    with pytest.raises(UsageError) as raised:
        wire.all_gather_equal(b"x")
    return str(raised.value)


def test_members_on_other_kinds_of_devices_are_refused_in_words(tmp_path: Path) -> None:
    with Team(2, _on_other_kinds, str(tmp_path / "store")) as team:
        told = team.result(1)
        team.say(0, "the run is over")
    assert "w4 on cpu and w7 on emu" in told
    assert 'unisono.Run(device="cpu")' in told


def _fail(seat: Seat, path: str, made: str, used: str, is_told: bool) -> tuple[str, str]:
    """The second member fails; the first one tells how it learns that."""
    wires.LIBRARY_S = WAIT_S if is_told or made != "hang" else 1.0
    timeout_s = 1.0 if used and not is_told else WAIT_S
    wire, library = _enter(seat, path, AGENT[seat.rank], timeout_s, made=made if seat.rank == 1 else "")
    if seat.rank == 1:
        if not made:
            wire.all_gather_equal(b"x")
            library.failure.used = used
            wire.all_gather_equal(b"y")
        seat.hear()
    if not made:
        wire.all_gather_equal(b"x")
    if is_told:  # as the head does when a worker has gone
        threading.Thread(target=lambda: (seat.hear(), wire.interrupt(PeerLost("w7 has gone")))).start()
    with pytest.raises((PeerLost, DeadlineExceeded)) as raised:
        wire.all_gather_equal(b"y")
    wire.close()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize(
    ("made", "used", "is_told", "error", "words"),
    [
        pytest.param("hang", "", True, "PeerLost", "w7 has gone", id="killed while it is made"),
        pytest.param(
            "hang", "", False, "DeadlineExceeded", "could not connect 2 members within 1 s", id="stands still"
        ),
        pytest.param("garbage", "", False, "PeerLost", r"emuccl gave \[1, 3\] for the numbers of 2", id="garbage"),
        pytest.param("", "hang", True, "PeerLost", "", id="killed in a collective"),
        pytest.param("", "hang", False, "DeadlineExceeded", "1 s", id="stands still in a collective"),
    ],
)
def test_who_is_lost_in_the_library_is_lost_as_everywhere_else(
    made: str, used: str, is_told: bool, error: str, words: str, tmp_path: Path
) -> None:
    """The others hear of it, whatever a thread waits for in the library."""
    with Team(2, _fail, str(tmp_path / "store"), made, used, is_told) as team:
        if is_told:
            assert team.hear(1) == "hangs"
            team.kill(1)
            team.say(0, "it was killed")
        kind, told = team.result(0)
        team.kill(1)
    assert re.fullmatch(error, kind)
    assert re.search(words, told)
