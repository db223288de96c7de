"""Whoever waits for another member knows for whom; and what is waited for data is known as well."""

from __future__ import annotations

import pathlib
import threading
import time

import pytest
import torch

import unisono
from tests.pure.test_watch import Kept
from tests.workers.exchanges import BLOCKING, Member, every_team, layouts, share_of
from tests.workers.processes import Seat, Team, when_blocked_in
from unisono.core.events import Seconds, StepFinished
from unisono.core.telemetry import StepTelemetry
from unisono.core.waits import NO_WAIT, Wait, wait_of
from unisono.engine.exchange import combine

pytestmark = pytest.mark.more

A_WHILE_S = 0.3
"""Longer than a commit takes from the first member that sees it to the last one, on a busy machine."""
SAMPLE_S = 0.01


def _combine(seat: Seat, kind: str, path: str, late: int) -> Wait:
    """One member comes when all others have waited for a while."""
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    exchange.prepare(layouts()[0])
    before = combine(exchange, share_of(exchange, 0, 2 * seat.size), StepTelemetry().pack())
    exchange.release(before.slot)
    watcher, a_while = None, threading.Event()
    if seat.rank == late:
        seat.hear()
    else:
        watcher = when_blocked_in(BLOCKING, lambda: (a_while.wait(A_WHILE_S), seat.say("blocked")))
    share = share_of(exchange, 1, 2 * seat.size)
    own = StepTelemetry(ready_s=time.perf_counter() - before.committed_at)
    combined = combine(exchange, share, own.pack())
    if watcher is not None:
        watcher.join()
    exchange.all_gather(b"")
    exchange.close()
    return wait_of(seat.rank, [StepTelemetry.unpack(each).ready_s for each in combined.telemetry])


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
    for rank, wait in enumerate(results):
        if rank == late:
            assert wait == NO_WAIT
        else:
            assert wait.rank == late
            assert wait.seconds > A_WHILE_S / 2


class Slow:
    """A dataset whose samples take a while, on any machine."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(SAMPLE_S)
        return torch.full((4,), index / 80)


def _seconds_of_steps(loader_workers: int) -> list[Seconds]:
    sink = Kept()
    with unisono.Run(seed=1, sinks=[sink]) as run:
        model = torch.nn.Linear(4, 1)
        run.track(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.01)))
        for step in run.steps(Slow(), batch_size=8, microbatches=2, max_steps=6, loader_workers=loader_workers):
            for batch in step:
                threading.Event().wait(5 * SAMPLE_S)
                model(batch).square().mean().backward()
            optimizer.step()
    return [event.seconds for event in sink.events if isinstance(event, StepFinished)][1:]


def test_data_is_the_time_that_was_waited_for_it_and_not_the_time_that_loading_took() -> None:
    """What loader processes do while the worker computes costs nothing."""
    here, ahead = (sum(each.data for each in _seconds_of_steps(number)) for number in (0, 2))
    assert here >= 5 * 8 * SAMPLE_S
    assert ahead < here / 2
