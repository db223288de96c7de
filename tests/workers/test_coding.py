"""Coded messages: the same bits in fewer bytes, for every exchange, with members that cannot, and through losses."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from tests.workers.exchanges import (
    ROUNDING,
    STEPS,
    Member,
    Outcome,
    expected,
    layouts,
    share_of,
    telemetry_of,
)
from tests.workers.processes import Seat, Team
from unisono.core.coding_rules import Mode
from unisono.engine.exchange import Exchange, combine
from unisono.engine.exchange.network import Network
from unisono.engine.exchange.two_level import TwoLevel
from unisono.engine.exchange.wire import Wire

pytestmark = pytest.mark.more

NETWORKS = [("gloo", 2), ("gloo", 3), ("gloo", 5), ("two-level", 3), ("two-level", 4)]


def wire_of(exchange: Exchange) -> Wire | None:
    assert isinstance(exchange, Network | TwoLevel)
    return exchange.wire


def _all_steps(seat: Seat, kind: str, path: str, without: tuple[int, ...]) -> dict[str, Any]:
    exchange = Member(kind, seat, path, coding=Mode.NEVER if seat.rank in without else Mode.ALWAYS).enter(
        1, range(seat.size)
    )
    wire, made = wire_of(exchange), layouts()
    steps, coded, prepared = [], [], -1
    for step, (layout, num_leaves) in enumerate(STEPS):
        if layout != prepared:
            exchange.prepare(made[layout])
            prepared = layout
        coded.append(wire.coder.senders if wire is not None else ())
        share = share_of(exchange, step, num_leaves)
        if step % 2 and seat.rank % 2:
            exchange.offer(share, made[layout].tail_row // 2)
        combined = combine(exchange, share, telemetry_of(seat.rank, step))
        assert list(combined.telemetry) == [telemetry_of(rank, step) for rank in range(seat.size)]
        steps.append(Outcome.of(combined))
        exchange.release(combined.slot)
    exchange.all_gather(b"")
    exchange.close()
    return {"steps": steps, "coded": coded, "sent": combined.sent_bytes}


@pytest.mark.parametrize("without", [(), (1,)], ids=["all", "not all"])
@pytest.mark.parametrize(("kind", "size"), NETWORKS)
def test_coded_sums_have_the_same_bits(
    kind: str, size: int, without: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    """All dtypes and layouts; the first sum of an exchange is never coded, and none where a member cannot."""
    with Team(size, _all_steps, kind, str(tmp_path), without) as team:
        results = team.results()
    for result in results:
        assert result["steps"] == [expected(layout, step, number) for step, (layout, number) in enumerate(STEPS)]
        first, *others = result["coded"]
        assert not any(first)
        for senders in others if first else ():
            assert all(senders) if not without else not any(senders) or kind == "two-level"
