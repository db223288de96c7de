"""What a worker records: the same events on all members, written by one, told by one, whoever is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.pure.test_watch import Kept, started
from unisono.core.errors import UsageError
from unisono.core.events import (
    Announcement,
    EvaluationFinished,
    Event,
    MembershipChanged,
    RunEnded,
    RunStarted,
    Seconds,
    StepFinished,
    StepResult,
    WorkerTimes,
)
from unisono.core.messages import StepDone
from unisono.core.telemetry import StepTelemetry, StepTimes
from unisono.record.journal import JOURNAL, Journal, read
from unisono.script.recording import OUTSIDE, Recorder, Role

NOW = 1790000000.125


class Heard:
    """A head that keeps what it hears."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.happened_: list[Event] = []

    def step_done(self, done: StepDone, *, tells: bool) -> None:
        if tells:
            self.done.append(done.step)

    def happened(self, event: Event) -> None:
        self.happened_.append(event)


class Worker:
    """A recorder with what it records into."""

    def __init__(self, folder: Path) -> None:
        self.sink, self.head = Kept(), Heard()
        self.journal = Journal(folder / JOURNAL)
        self.recorder = Recorder(self.journal, [self.sink], self.head, clock=lambda: NOW + 0.0001)

    def finish(self, step: int, role: Role, **changes: Any) -> None:
        values: dict[str, Any] = {
            "num_steps": 9,
            "seconds": {"compute": 0.25, "other": 0.5},
            "telemetry": dict.fromkeys(
                role.worker_ids, StepTelemetry(leaves=2, compute_s=0.125, last=Seconds(waiting=1 / 3))
            ),
            "logs": {},
            "checkpoint": {},
            "balance": "",
            "warnings": [],
            **changes,
        }
        result = StepResult(step=step, epoch=0, loss=0.5, weight=8.0, samples=8, digest=f"{step:016x}")
        self.recorder.step_finished(result, role, **values)

    def steps(self) -> list[int]:
        """Those that its sink was given."""
        return [event.step for event in self.sink.events if isinstance(event, StepFinished)]


def role(rank: int, generation: int = 1, *, is_writer: bool | None = None) -> Role:
    ids = ("w0", "w1") if generation == 1 else ("w1", "w2")
    return Role(
        rank=rank,
        generation=generation,
        worker_ids=ids,
        is_writer=rank == 0 if is_writer is None else is_writer,
        reason="all are ready",
    )


def test_a_step_is_one_value_for_the_journal_the_sinks_and_the_head(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.recorder.run_started(started(), role(0), is_newcomer=False)
    worker.finish(0, role(0), logs={"lr": 0.1}, balance="w0 gets 3", checkpoint={"saved": 0}, warnings=["w1 differs"])
    worker.recorder.evaluation_finished(1, {"right": 3}, role(0))
    worker.recorder.run_ended(role(0), ok=True, digests={"model": "5f3a"})
    times = WorkerTimes(leaves=2, compute=0.125, last=Seconds(waiting=1 / 3))
    found = StepFinished(
        step=0, epoch=0, loss=0.5, weight=8.0, samples=8, digest="0" * 16, num_steps=9, generation=1,
        seconds=Seconds(compute=0.25, other=0.5), means=Seconds(waiting=0.333333),
        workers={"w0": times, "w1": times}, logs={"lr": 0.1},
        checkpoint={"saved": 0}, balance="w0 gets 3", warnings=["w1 differs"], time=NOW, number=0,
    )  # fmt: skip
    said = [
        started(),
        MembershipChanged(time=NOW, generation=1, worker_ids=("w0", "w1"), reason="all are ready"),
        found,
        EvaluationFinished(time=NOW, number=1, step=1, totals={"right": 3}),
        RunEnded(time=NOW, number=2, ok=True, reason="", digests={"model": "5f3a"}),
    ]
    assert worker.sink.events == said
    told = [event for event in said if not isinstance(event, MembershipChanged)]
    assert worker.head.happened_ == told, "the head knows by itself who is in the run"
    assert [each.number for each in worker.head.happened_ if each.number >= 0] == [0, 1, 2]
    assert worker.head.done == [0]
    assert [line["kind"] for line in read(tmp_path)] == ["step", "evaluation", "end"]
    assert [line["time"] for line in read(tmp_path)] == [NOW] * 3


@pytest.mark.parametrize("written", [3, 4], ids=["before its line", "after its line"])
def test_the_next_writer_gives_its_sinks_what_the_lost_one_has_not(written: int, tmp_path: Path) -> None:
    """Rank 0 is lost after step 3 is finished: each step is in the file once, and one of the sinks has had it."""
    first, second = Worker(tmp_path), Worker(tmp_path)
    for rank, worker in enumerate((first, second)):
        worker.recorder.run_started(started(), role(rank), is_newcomer=False)
    for number in range(4):
        second.finish(number, role(1))
        if number < written:
            first.finish(number, role(0))
    assert second.sink.events == []
    for number in (4, 5):
        second.finish(number, role(0, generation=2))
    assert first.steps() + second.steps() == list(range(6))
    assert [line["step"] for line in read(tmp_path)] == list(range(6))
    assert isinstance(second.sink.events[0], RunStarted)
    changed = MembershipChanged(time=NOW, generation=2, worker_ids=("w1", "w2"), reason="all are ready")
    assert changed in second.sink.events


def test_the_next_rank_0_tells_its_last_events_again(tmp_path: Path) -> None:
    """The one before may have been lost before it told them. They have the same numbers, so the repetition is seen."""
    worker = Worker(tmp_path)
    for number in range(3):
        worker.finish(number, role(1))
    assert worker.head.happened_ == []
    worker.recorder.tell_again(role(1))
    assert worker.head.done == []
    worker.recorder.tell_again(role(0, generation=2))
    assert worker.head.done == [0, 1, 2]
    assert [each.number for each in worker.head.happened_] == [0, 1, 2]
    worker.recorder.tell_again(role(0, generation=2))
    assert worker.head.done == [0, 1, 2], "nothing has changed"


def test_what_was_evaluated_before_the_run_began_is_told_by_its_first_writer(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.recorder.evaluation_finished(0, {3: 1.0}, OUTSIDE)
    assert (worker.sink.events, worker.head.happened_) == ([], [])
    worker.recorder.run_started(started(), role(0), is_newcomer=False)
    before = EvaluationFinished(time=NOW, number=0, step=0, totals={"3": 1.0})
    assert worker.sink.events[:2] == [started(), before]
    assert worker.head.happened_[:2] == [started(), before]
    assert [line["kind"] for line in read(tmp_path)] == ["evaluation"]


def test_a_newcomer_does_not_say_that_the_run_starts(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.recorder.run_started(started(4), role(0), is_newcomer=True)
    assert not any(isinstance(each, RunStarted) for each in worker.head.happened_)
    assert isinstance(worker.sink.events[0], RunStarted)


def test_a_writer_that_is_left_behind_writes_nothing_more(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.finish(0, role(0))
    worker.finish(1, role(0, is_writer=False))
    assert worker.steps() == [0]
    assert [line["step"] for line in read(tmp_path)] == [0]


def test_what_is_no_sink_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sinks= takes objects with emit\(event\) and close\(\); got 'terminal'"):
        Recorder(Journal(None), ["terminal"], None)  # type: ignore[list-item]


def test_a_sink_that_is_added_gets_the_start_of_the_run_and_what_follows(tmp_path: Path) -> None:
    writer, other = Worker(tmp_path), Worker(tmp_path)
    early = Kept()
    writer.recorder.add_sink(early)
    for rank, worker in enumerate((writer, other)):
        worker.recorder.run_started(started(), role(rank), is_newcomer=False)
        worker.finish(0, role(rank))
    assert early.events == writer.sink.events
    late, idle = Kept(), Kept()
    writer.recorder.add_sink(late)
    other.recorder.add_sink(idle)
    for rank, worker in enumerate((writer, other)):
        worker.finish(1, role(rank))
    members = MembershipChanged(generation=1, worker_ids=("w0", "w1"), reason="all are ready")
    assert [replace(event, time=0.0) for event in late.events[:2]] == [started(), members]
    assert [event.step for event in late.events[2:] if isinstance(event, StepFinished)] == [1]
    assert idle.events == []
    other.finish(2, role(0, generation=2))
    assert [event.step for event in idle.events if isinstance(event, StepFinished)] == [2]
    for worker in (writer, other):
        worker.recorder.close()
    assert [sink.num_closed for sink in (early, late, idle)] == [1, 1, 1]


def test_an_added_sink_that_raises_at_once_is_dropped(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.recorder.run_started(started(), role(0), is_newcomer=False)
    broken = Kept(fails_at=started())
    worker.recorder.add_sink(broken)
    worker.finish(0, role(0))
    assert broken.events == [started()]
    assert worker.steps() == [0]


def test_what_is_added_and_no_sink_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.add_sink takes objects with emit\(event\) and close\(\); got 3"):
        Worker(tmp_path).recorder.add_sink(3)  # type: ignore[arg-type]


def test_a_worker_that_becomes_the_writer_again_says_anew_that_the_run_started(tmp_path: Path) -> None:
    """A tool that another writer has gone on with meanwhile looks again for what it lacks."""
    worker = Worker(tmp_path)
    worker.recorder.run_started(started(), role(0), is_newcomer=False)
    for number, writes in enumerate([True, False, True]):
        worker.finish(number, role(0, is_writer=writes))
    assert worker.sink.events.count(started()) == 2
    assert worker.steps() == [0, 1, 2]


def test_what_makes_steps_longer_is_said_to_the_head_and_the_sinks_and_is_no_line(tmp_path: Path) -> None:
    """Each once: by rank 0 to the head, by the writer to its sinks. Hosts are named, and times are given."""
    writer, other = Worker(tmp_path), Worker(tmp_path)

    def step(number: int, compute: float) -> None:
        last = Seconds(compute=compute, waiting=1.0 - compute)
        waits = StepTimes(waits_for=1, waits_s=compute - 0.1) if compute > 0.1 else StepTimes()
        telemetry = {
            "w0": StepTelemetry(leaves=1, compute_s=0.1, last=last, times=waits),
            "w1": StepTelemetry(leaves=1, compute_s=compute, last=last),
        }
        for worker, rank in ((writer, 0), (other, 1)):
            worker.finish(number, dataclasses.replace(role(rank), hosts=("a", "b")), telemetry=telemetry)

    for number in range(20):
        step(number, 0.1 if number < 10 else 0.5)
    assert [event.text[:30] for event in writer.sink.events if isinstance(event, Announcement)] == [
        "w1 on b takes 5.0x as long for"
    ]
    assert [each for each in writer.head.happened_ if isinstance(each, Announcement)] == [
        event for event in writer.sink.events if isinstance(event, Announcement)
    ]
    assert not [each for each in other.head.happened_ if isinstance(each, Announcement)]
    assert all(line["kind"] == "step" for line in read(tmp_path))
