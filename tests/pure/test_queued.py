"""A slow sink behind a queue: the training never waits for it, and what it misses is said."""

from __future__ import annotations

import threading

from tests.pure.test_journal import end, step
from tests.pure.test_watch import Kept, started
from tests.waiting import WAIT_S
from unisono.core.events import Event
from unisono.views.watch import Sink
from unisono.views.watch.queued import Queued


class Slow(Kept):
    """Stands still at its first event until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.stands, self.go_on = threading.Event(), threading.Event()

    def emit(self, event: Event) -> None:
        self.stands.set()
        assert self.go_on.wait(WAIT_S)
        super().emit(event)


def test_events_arrive_in_order_and_the_end_waits_for_them() -> None:
    slow = Kept()
    queued = Queued(slow, patience_s=WAIT_S)
    assert isinstance(queued, Sink)
    said = [started(), *map(step, range(50)), end()]
    for event in said:
        queued.emit(event)
    queued.close()
    assert slow.events == said
    assert slow.num_closed == 1


def test_a_sink_that_stands_still_costs_events_and_no_time() -> None:
    reports: list[str] = []
    slow = Slow()
    queued = Queued(slow, most=3, every_s=0.0, patience_s=WAIT_S, report=reports.append)
    queued.emit(started())
    assert slow.stands.wait(WAIT_S)  # from here on the slow sink takes nothing
    for number in range(8):
        queued.emit(step(number))
    queued.emit(end())  # what begins and ends a run is always given
    slow.go_on.set()
    queued.close()
    assert slow.events == [started(), *map(step, range(3)), end()]
    assert "5 events in all, the first of them step 3" in reports[-1]
    assert all("slower than the run" in each for each in reports)


def test_the_end_of_a_run_gives_up_a_sink_that_never_comes_back() -> None:
    reports: list[str] = []
    slow = Slow()
    queued = Queued(slow, every_s=0.0, patience_s=0.01, report=reports.append)
    queued.emit(started())
    assert slow.stands.wait(WAIT_S)
    queued.emit(step(0))
    queued.close()
    assert ["the sink Slow was not ready" in each for each in reports] == [True]
    slow.go_on.set()


def test_a_sink_that_raises_is_reported_once_and_gets_nothing_more() -> None:
    reports: list[str] = []
    broken = Kept(fails_at=step(1))
    queued = Queued(broken, patience_s=WAIT_S, report=reports.append)
    for number in range(4):
        queued.emit(step(number))
    queued.close()
    assert broken.events == [step(0), step(1)]
    assert broken.num_closed == 1
    assert reports == ["the sink Kept gets no more events: its emit() raised OSError: no space; the run continues"]


def test_a_worker_that_is_not_the_writer_has_no_thread() -> None:
    before = threading.active_count()
    queued = Queued(kept := Kept())
    assert threading.active_count() == before
    queued.close()
    assert kept.num_closed == 0, "it was never opened"
