"""Every second of a step belongs to one part, whatever is moved between the parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unisono.core.telemetry import PARTS
from unisono.core.waits import NO_WAIT, Wait
from unisono.engine.rounds import clock as module
from unisono.engine.rounds.clock import Clock


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(module, "time", time := Time())
    return time


def test_the_parts_add_up_to_the_wall_time(time: Time) -> None:
    clock = Clock()
    for part, seconds in (("data", 1.0), ("compute", 2.0), ("exchange", 4.0)):
        clock.switch(part)
        time.now += seconds
    clock.switch("other")
    clock.note(Wait(1, 2.5), 3.0, generation=1)  # more than there is, by another clock
    clock.switch("update")
    time.now += 0.5
    parts = clock.reset()
    assert parts == {
        "data": 1.0, "compute": 2.0, "exchange": 0.0, "network": 1.5, "waiting": 2.5, "update": 0.5, "other": 0.0
    }  # fmt: skip
    assert sum(parts.values()) == time.now
    assert set(parts) == set(PARTS)


def test_what_is_done_together_between_two_steps_is_no_update(time: Time) -> None:
    clock = Clock()
    clock.switch("update")
    time.now += 1.0
    with clock.other():
        time.now += 8.0
    time.now += 1.0
    parts = clock.reset()
    assert (parts["update"], parts["other"]) == (2.0, 8.0)


def test_the_sums_of_a_step_are_told_together(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several passes; those of a generation that is over have other ranks, and are left out."""
    faults = iter((100, 107))
    monkeypatch.setattr(
        module, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_majflt=next(faults)))
    )
    clock = Clock()
    clock.note(Wait(5, 9.0), 0.0, generation=1)
    for wait in (Wait(0, 0.5), Wait(1, 0.75), NO_WAIT, Wait(0, 0.5)):
        clock.note(wait, 0.1, generation=2)
    clock.reset()
    told = clock.times
    assert (told.waits_for, told.waits_s, clock.generation) == (0, 1.0, 2)
    assert told.page_faults == 7
    assert told.of_workers().waits_for == -1
    assert told.of_workers().page_faults == 7
