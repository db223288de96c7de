"""What happens in a run, as records of Python's logging."""

from __future__ import annotations

import logging

import pytest

from tests.pure.test_journal import end, evaluation, step
from tests.pure.test_watch import started
from unisono.core.events import Event, Problem, RunEnded, WorkerGone, WorkerLate
from unisono.views.watch import make


def gone(how: str) -> WorkerGone:
    return WorkerGone(worker_id="w2", host="m1", how=how, reason="signal 9", step=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (started(), "INFO", "the run begins"),
        (evaluation(1, right=3), "INFO", "evaluation at step 1: right 3"),
        (gone("left"), "INFO", "w2 on m1 has left"),
        (gone("lost"), "WARNING", "w2 on m1 was lost"),
        (
            WorkerLate(worker_id="w1", step=3, microbatch=0, seconds=4.0),
            "WARNING",
            "w1 has made no progress for 4 s at",
        ),
        (Problem(problem="nan", text="the loss is not a number"), "ERROR", "the loss is not a number"),
        (end(), "INFO", "the run has finished"),
        (RunEnded(ok=False, reason="w1 died", digests={}), "ERROR", "the run failed: w1 died"),
    ],
)
def test_events_have_fitting_levels(event: Event, level: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "unisono")
    make("logging").emit(event)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("unisono", level)
    assert text in record.getMessage()
    assert record.event is event  # type: ignore[attr-defined]


def test_progress_is_said_now_and_then_and_each_step_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "unisono")
    sink = make("logging")
    for number in range(5):
        sink.emit(step(number))
    assert [record.levelname for record in caplog.records] == ["INFO", *["DEBUG"] * 4]


def test_the_name_of_the_logger_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    make("logging", "mine.run").emit(RunEnded(ok=False, reason="w1 died", digests={}))
    assert [record.name for record in caplog.records] == ["mine.run"]
