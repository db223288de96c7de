"""Whoever waits in an exchange knows for whom."""

from __future__ import annotations

import pathlib
import threading

import pytest

from tests.workers.exchanges import BLOCKING, Member, every_team, layouts, share_of, telemetry_of
from tests.workers.processes import Seat, Team, when_blocked_in
from unisono.exchange import combine
from unisono.exchange.spent import Spent

A_WHILE_S = 0.3
"""Longer than the members wait for each other on a busy machine."""


def _combine(seat: Seat, kind: str, path: str, late: int) -> Spent:
    """One member comes when all others have waited for a while."""
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    exchange.prepare(layouts()[0])
    exchange.all_gather(b"")
    watcher, a_while = None, threading.Event()
    if seat.rank == late:
        seat.hear()
    else:
        watcher = when_blocked_in(BLOCKING, lambda: (a_while.wait(A_WHILE_S), seat.say("blocked")))
    spent = combine(exchange, share_of(exchange, 0, 2 * seat.size), telemetry_of(seat.rank, 0)).spent
    if watcher is not None:
        watcher.join()
    exchange.all_gather(b"")
    exchange.close()
    return spent


@every_team
@pytest.mark.parametrize("place", ["first", "last"])
def test_all_others_have_waited_for_the_member_that_came_last(
    kind: str, size: int, place: str, tmp_path: pathlib.Path
) -> None:
    """Also where sums cross hosts, and where they meet in memory that some members share."""
    late = 0 if place == "first" else size - 1
    with Team(size, _combine, kind, str(tmp_path), late) as team:
        for rank in range(size):
            if rank != late:
                assert team.hear(rank) == "blocked"
        team.say(late, "all wait")
        results = team.results()
    for rank, spent in enumerate(results):
        waited_for, seconds = spent.longest_wait()
        if rank == late:
            assert late not in spent.waiting
        else:
            assert waited_for == late, spent
            assert seconds > 0.0
