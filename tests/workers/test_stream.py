"""What travels between hosts: how much, and when."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Sequence

import pytest
from torch import nn

from tests.waiting import WAIT_S
from tests.workers.exchanges import ROUNDING, Member, Outcome, expected, layouts, share_of, telemetry_of
from tests.workers.processes import Seat, Team
from unisono.core.plan import plan
from unisono.core.routes import split_rows
from unisono.core.tree import Node, schedule
from unisono.engine.exchange import TELEMETRY_BYTES, combine
from unisono.engine.exchange.coder import WORD_BYTES
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout
from unisono.engine.exchange.network import Network
from unisono.engine.exchange.pump import Job, Pump
from unisono.engine.exchange.reduce import Reduction
from unisono.engine.exchange.stream import RangeSum, cut
from unisono.engine.exchange.wire import DIGEST_BYTES
from unisono.testing import run_workers
from unisono.tools.plan.wires import num_pieces

pytestmark = pytest.mark.more

LAYOUT = 2  # of several pieces


def bytes_of_lane(rows: range, plan: Sequence[Sequence[Node]], rank: int, told: int) -> int:
    """The formula of docs/decisions.md: what a member of a lane sends in a step."""
    others = len(plan) - 1
    own = sum(len(split_rows(piece, len(plan))[rank]) for piece in cut(rows))
    there, back = len(plan[rank]) * (len(rows) - own), others * own
    return ROW_BYTES * (there + back) + others * (DIGEST_BYTES + WORD_BYTES + told)


def rounded_bytes(layout: FlatLayout, plan: Sequence[Sequence[Node]], rank: int, lowest: int) -> int:
    """The same where nodes from the level ``lowest`` on are rounded: half of them in the rows of float32 sums."""
    others, narrow = len(plan) - 1, layout.rounded_rows
    there = back = 0
    for piece in cut(range(layout.num_rows)):
        for owner, chunk in enumerate(split_rows(piece, len(plan))):
            saved = ROW_BYTES // 2 * sum(row in narrow for row in chunk)
            if owner == rank:
                back = back + others * (ROW_BYTES * len(chunk) - saved)
            else:
                there += sum(ROW_BYTES * len(chunk) - saved * (node.level >= lowest) for node in plan[rank])
    return there + back + others * (DIGEST_BYTES + WORD_BYTES + TELEMETRY_BYTES)


def _sent(seat: Seat, kind: str, path: str, num_leaves: int, layout: int = LAYOUT) -> tuple[int, list[list[Node]]]:
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    exchange.prepare(layouts()[layout])
    share = share_of(exchange, 1, num_leaves)
    combined = combine(exchange, share, telemetry_of(seat.rank, 1))
    assert Outcome.of(combined) == expected(layout, 1, num_leaves)
    exchange.all_gather(b"")
    exchange.close()
    return combined.sent_bytes, [list(nodes) for nodes in share.plan]


@pytest.mark.parametrize(("size", "num_leaves"), [(2, 4), (2, 5), (3, 6), (3, 8)])
def test_a_member_sends_the_bytes_of_the_formula(size: int, num_leaves: int, tmp_path: pathlib.Path) -> None:
    """With hosts x 2^k micro-batches those of a ring, and else its nodes times as many on the way there."""
    with Team(size, _sent, "gloo", str(tmp_path), num_leaves) as team:
        results = team.results()
    rows = range(layouts()[LAYOUT].num_rows)
    for rank, (sent, nodes) in enumerate(results):
        assert sent == bytes_of_lane(rows, nodes, rank, TELEMETRY_BYTES)
    if num_leaves == 2 * size:
        ring = 2 * (size - 1) / size * len(rows) * ROW_BYTES
        assert sum(sent for sent, _ in results) / size == pytest.approx(ring, rel=0.01)


@pytest.mark.parametrize(("size", "num_leaves", "lowest"), [(2, 4, 0), (3, 5, 0), (2, 32, 2), (3, 32, 2)])
def test_what_is_rounded_travels_in_half_the_bytes(
    size: int, num_leaves: int, lowest: int, tmp_path: pathlib.Path
) -> None:
    """Nodes below the level, and what is not a float32 sum, travel as they are."""
    layout = layouts()[ROUNDING]
    with Team(size, _sent, "gloo", str(tmp_path), num_leaves, ROUNDING) as team:
        results = team.results()
    for rank, (sent, nodes) in enumerate(results):
        assert sent == rounded_bytes(layout, nodes, rank, lowest)
        if size == 2:
            assert sent == pytest.approx(bytes_of_lane(range(layout.num_rows), nodes, rank, 0) / 2, rel=0.01)


def test_a_host_sends_a_row_once_for_all_of_its_members(tmp_path: pathlib.Path) -> None:
    """Two members on each of two hosts: together they send what one member would."""
    with Team(4, _sent, "two-level", str(tmp_path), 8) as team:
        results = team.results()
    rows = range(layouts()[LAYOUT].num_rows)
    nodes = results[0][1]
    hosts = [schedule([*nodes[first], *nodes[first + 1]], 8)[1] for first in (0, 2)]
    for host in range(2):
        lanes = [
            bytes_of_lane(lane, hosts, host, 2 * TELEMETRY_BYTES if number == 0 else 0)
            for number, lane in enumerate(split_rows(rows, 2))
        ]
        assert [results[2 * host + number][0] for number in range(2)] == lanes


def _by_collectives(seat: Seat, path: str, number: int, num_leaves: int) -> list[Outcome]:
    exchange = Member("gloo", seat, path).enter(1, range(seat.size))
    assert isinstance(exchange, Network)
    exchange.kind = Reduction
    layout = layouts()[number]
    exchange.prepare(layout)
    outcomes = []
    for step, rows_offered in enumerate((0, layout.num_rows // 2, layout.num_rows)):
        share = share_of(exchange, step, num_leaves)
        exchange.offer(share, rows_offered)
        outcomes.append(Outcome.of(combined := combine(exchange, share, telemetry_of(seat.rank, step))))
        exchange.release(combined.slot)
    exchange.all_gather(b"")
    exchange.close()
    return outcomes


@pytest.mark.parametrize(("layout", "num_leaves"), [(LAYOUT, 5), (ROUNDING, 5), (ROUNDING, 20)])
def test_the_collectives_that_gpus_need_give_the_same_bits(
    layout: int, num_leaves: int, tmp_path: pathlib.Path
) -> None:
    with Team(3, _by_collectives, str(tmp_path), layout, num_leaves) as team:
        assert team.results() == [[expected(layout, step, num_leaves) for step in range(3)]] * 3


SCRIPT = """
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset

with unisono.Run(seed=1) as run:
    model = nn.Linear(70, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(TensorDataset(torch.ones(24, 70)), batch_size=8, microbatches=4):
        for (inputs,) in step:
            step.backward(model(inputs).square().mean())
        optimizer.step()
"""


@pytest.mark.usefixtures("nursery")
def test_the_journal_has_the_bytes_of_a_step(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outcome = run_workers(script, 2, directory=tmp_path / "run", options=["--exchange", "gloo"], timeout_s=WAIT_S)
    assert outcome.exit_code == 0, outcome.output
    rows = range(FlatLayout(list(nn.Linear(70, 50).named_parameters()), []).num_rows)
    right = bytes_of_lane(rows, plan(2, 4).nodes, 0, TELEMETRY_BYTES)
    assert [line["sent_bytes"] for line in outcome.lines if line["kind"] == "step"] == [right] * 3


def _offer_half(seat: Seat, path: str) -> tuple[int, int, Outcome]:
    exchange = Member("gloo", seat, path).enter(1, range(seat.size))
    assert isinstance(exchange, Network)
    layout = layouts()[LAYOUT]
    exchange.prepare(layout)
    share = share_of(exchange, 1, 4)
    exchange.offer(share, layout.num_rows // 2)
    assert exchange._offered is not None
    stream = exchange._offered._sum
    assert isinstance(stream, RangeSum)
    with exchange.wire.changed:
        assert exchange.wire.changed.wait_for(lambda: stream._num_folded == stream._num_ready, WAIT_S)
    before = stream._num_folded, len(stream._pieces)
    combined = combine(exchange, share, telemetry_of(seat.rank, 1))
    exchange.all_gather(b"")
    exchange.close()
    return *before, Outcome.of(combined)


def test_sums_of_the_first_rows_leave_while_the_last_ones_are_computed(tmp_path: pathlib.Path) -> None:
    with Team(2, _offer_half, str(tmp_path)) as team:
        for folded, num_pieces, outcome in team.results():
            assert 0 < folded <= num_pieces // 2 + 1
            assert outcome == expected(LAYOUT, 1, 4)


def test_the_failure_of_a_job_ends_those_behind_it() -> None:
    """They could not do what they are for, and nobody may wait for them."""
    changed, broken, gate = threading.Condition(), OSError("the other end is gone"), threading.Event()

    def fail() -> None:
        gate.wait(WAIT_S)
        raise broken

    pump, jobs = Pump(changed), [Job(lambda: None), Job(fail), Job(lambda: None)]
    for job in jobs:
        pump.add(job)
    gate.set()
    with changed:
        assert changed.wait_for(lambda: all(job.is_completed() for job in jobs), WAIT_S)
    late = Job(lambda: None)
    pump.add(late)
    assert late.is_completed()
    assert [job.failure for job in (*jobs, late)] == [None, broken, broken, broken]


def test_a_pump_that_is_stopped_leaves_no_thread() -> None:
    changed, done = threading.Condition(), threading.Event()
    pump = Pump(changed)
    pump.add(Job(done.set))
    assert done.wait(WAIT_S)
    (thread,) = [each for each in threading.enumerate() if each.name == "unisono-pump"]
    pump.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_pieces_cover_the_rows_and_grow_with_them() -> None:
    for num_rows in (0, 1, 511, 512, 8000, 200_000, 2_000_000):
        pieces = cut(range(7, 7 + num_rows))
        assert [row for piece in pieces for row in piece][:: max(1, num_rows // 9)] == list(
            range(7, 7 + num_rows, max(1, num_rows // 9))
        )
        assert len(pieces) <= 96
        assert len(pieces) == num_pieces(num_rows * ROW_BYTES)  # as forecasts count them


def test_pieces_are_large_and_the_last_ones_small() -> None:
    """Each costs a wake-up and some Python; only of the last one everybody waits for its way there and back."""
    *large, half, last = [len(piece) * ROW_BYTES for piece in cut(range(8200))]
    assert (half, last) == (512 << 10, 256 << 10)
    assert len(large) == 4
    assert 1 << 19 < min(large) <= max(large) <= 1 << 20
