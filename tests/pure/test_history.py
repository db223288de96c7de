"""The history of a run from its files: what the index says is what the lines say, wherever a writer was cut off."""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.test_journal import end, evaluation, run_with, step
from tests.watch.long_run import make_long_run
from unisono import cli
from unisono.core.events import (
    Interruption,
    MembershipChanged,
    Problem,
    RunStarted,
    Seconds,
    StepFinished,
    WorkerGone,
    WorkerJoined,
    WorkerTimes,
)
from unisono.record.chronicle import line_of
from unisono.record.history import History
from unisono.record.history import index as index_module
from unisono.record.history import journal_blocks as lines_module
from unisono.record.history import reading as reading_module
from unisono.record.history import story_events as story_module
from unisono.record.history.machines import steps_of
from unisono.record.journal import JOURNAL, Journal, conclude, read, to_line, truncate
from unisono.record.journal.file import INDEX
from unisono.record.journal.lines import LineEvent, number_in, text_of
from unisono.record.journal.newest import MOST_BYTES, earlier
from unisono.record.journal.times import TIMES, by_step
from unisono.record.rundir import EVENTS_FILE, USE_FILE, Lock, holder
from unisono.views.report import account, report

ODD = {math.nan: "nan", math.inf: "inf", -math.inf: "-inf"}
STEPS = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few lines, so that few lines have many."""
    shrink(monkeypatch)


def shrink(patch: pytest.MonkeyPatch, *, exact: int = 6) -> None:
    patch.setattr(index_module, "BLOCK_LINES", 4)
    patch.setattr(lines_module, "BLOCK_LINES", 4)
    patch.setattr(lines_module, "WORTH_SAVING", 2)
    patch.setattr(lines_module, "PIECE_BYTES", 2000)
    patch.setattr(reading_module, "EXACT_STEPS", exact)


def some_step(number: int, loss: float = 0.5, **logs: float) -> StepFinished:
    seconds = Seconds(compute=0.5 + number / 100, other=0.25)
    return step(number, loss=loss, logs=logs, seconds=seconds, time=1000.0 + number)


def told(value: float) -> Any:
    return value if math.isfinite(value) else "nan" if math.isnan(value) else ODD[value]


def series_of(directory: Path, name: str) -> list[tuple[int, float]]:
    """Read all lines, and look at each."""
    found: list[tuple[int, float]] = []
    for line in read(directory):
        value: Any = None
        if line["kind"] == "step":
            seconds = line["seconds"]
            match name.split("/"):
                case ["loss"]:
                    value = number_in(line["loss"])
                case ["step_s"]:
                    value = sum(seconds.values())
                case ["samples_per_s"]:
                    value = line["samples"] / sum(seconds.values())
                case ["part", part]:
                    value = seconds[part]
                case ["log", key]:
                    value = line["logs"].get(key)
        elif line["kind"] == "evaluation" and name.startswith("evaluation/"):
            value = line["totals"].get(name.partition("/")[2])
        if value is not None:
            found.append((line["step"], number_in(value)))
    return found


NAMES = ("loss", "step_s", "samples_per_s", "part/compute", "log/a", "log/b", "evaluation/right")


def check(directory: Path, history: History) -> None:
    """Compare every series with all lines: exactly, and in few points."""
    if not (directory / JOURNAL).exists():
        assert history.names() == []
        return
    whole = {name: series_of(directory, name) for name in NAMES}
    steps = [line["step"] for line in read(directory) if line["kind"] == "step"]
    assert history.span() == ((steps[0], steps[-1]) if steps else (0, -1))
    assert {name for name in NAMES if whole[name]} <= {*history.names()}
    for points in (1, 3, 1000):
        found = history.series(NAMES, points=points)
        for name in NAMES:
            assert len(found[name]["step"]) <= points
            check_points(found[name], whole[name])
    if len(steps) > 8:
        first, last = steps[len(steps) // 3], steps[2 * len(steps) // 3]
        found = history.series(NAMES, first, last, points=3)
        for name in NAMES[:-1]:
            check_points(found[name], [each for each in whole[name] if first <= each[0] <= last])
    for number in steps[:: max(1, len(steps) // 3)]:
        (loss,) = (value for step_, value in whole["loss"] if step_ == number)
        exact = history.series(["loss"], number, number)["loss"]
        assert [exact[key] for key in ("step", "low", "high")] == [[number], [told(loss)], [told(loss)]]


def check_points(points: dict[str, list[Any]], there: list[tuple[int, float]]) -> None:
    starts = points["step"]
    assert starts == sorted(starts)
    values = [value for _, value in there if not math.isnan(value)]
    lows = [value for value in map(float, points["low"]) if not math.isnan(value)]
    highs = [value for value in map(float, points["high"]) if not math.isnan(value)]
    assert (min(lows, default=0), max(highs, default=0)) == (min(values, default=0), max(values, default=0))
    if any(math.isnan(value) for _, value in there):
        assert "nan" in points["mean"]
    if len(starts) == 1 and all(math.isfinite(value) for _, value in there):
        low, mean, high = points["low"][0], points["mean"][0], points["high"][0]
        assert low - 1e-9 <= mean <= high + 1e-9


def write(directory: Path, events: Sequence[LineEvent]) -> Journal:
    directory.mkdir(exist_ok=True)
    journal = Journal(directory / JOURNAL)
    journal.start(writer=True)
    for event in events:
        journal.emit(event)
    return journal


def index_of(directory: Path) -> list[dict[str, Any]]:
    """Return the index, which a reader makes."""
    if not (directory / INDEX).exists():
        History(directory).complete()
    return [json.loads(text) for text in (directory / INDEX).read_text().splitlines()]


def stale(journal: Path) -> bytes:
    """Return the block of lines that a journal has no more, or has in another place."""
    size = journal.stat().st_size
    return b'{"offset":%d,"end":%d,"lines":3,"steps":3}\n' % (size - 50, size + 50)


# -- the index is what the lines are -----------------------------------------------------------------


LOSSES = st.sampled_from([0.5, 1.5, -2.0, 1e300, 5e-324, math.nan, math.inf, -math.inf])


@st.composite
def events_from(draw: st.DrawFn, first: int) -> list[LineEvent]:
    found: list[LineEvent] = []
    for number in range(first, first + draw(st.integers(0, 25))):
        logs = {name: draw(LOSSES) for name in ("a", "b") if draw(st.integers(0, 3)) == 0}
        found.append(some_step(number, draw(LOSSES), **logs))
        if draw(st.integers(0, 7)) == 0:
            found.append(evaluation(number + 1, right=draw(LOSSES), names=["x"]))
    return found


@settings(max_examples=100)
@given(st.data())
def test_the_index_says_what_the_lines_say(data: st.DataObject) -> None:
    """Whoever writes, is killed in the middle of a line, and goes on, or goes back to a checkpoint; whatever another
    reader has left as the index.
    """
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        directory = Path(place)
        path, index = directory / JOURNAL, directory / INDEX
        seen = History(directory)  # a reader that is there all the time
        for _ in range(data.draw(st.integers(1, 4))):
            lines = list(read(directory)) if path.exists() else []
            if lines and data.draw(st.booleans()):
                truncate(path, data.draw(st.integers(0, len(lines))))
                lines = list(read(directory))
            steps = [line["step"] for line in lines if line["kind"] == "step"]
            journal = Journal(path)
            journal.go_on_at(len(lines))
            journal.start(writer=True)
            for event in data.draw(events_from(steps[-1] + 1 if steps else 0)):
                journal.emit(event)
                if data.draw(st.integers(0, 19)) == 0:
                    seen.refresh()
            if path.exists() and data.draw(st.booleans()):
                with path.open("ab") as file:
                    file.write(b'{"line": 7, "kind": "st')
            match data.draw(st.integers(0, 5)) if index.exists() else 9:
                case 0:
                    index.unlink()
                case 1:
                    index.write_bytes(index.read_bytes()[: -data.draw(st.integers(1, 300))])
                case 2:
                    index.write_bytes(b"\x00\xff nonsense\n" + index.read_bytes())
                case 3:
                    index.write_bytes(index.read_bytes() + stale(path))
            if path.exists() and data.draw(st.booleans()):
                seen.refresh()
            if data.draw(st.booleans()):
                History(directory).complete()
        seen.refresh()
        for history in (seen, History(directory)):
            history.complete()
            check(directory, history)


def test_the_first_reader_makes_the_index_and_the_training_none(tmp_path: Path) -> None:
    write(tmp_path, [some_step(number) for number in range(STEPS)])
    assert not (tmp_path / INDEX).exists()
    assert sum(block["lines"] for block in index_of(tmp_path)) == STEPS
    journal = Journal(tmp_path / JOURNAL)
    journal.go_on_at(STEPS)
    journal.start(writer=True)
    for number in range(STEPS, 3 * STEPS):
        journal.emit(some_step(number))
    History(tmp_path).complete()
    assert sum(block["lines"] for block in index_of(tmp_path)) == 3 * STEPS
    assert {path.name for path in tmp_path.iterdir()} == {JOURNAL, INDEX}, "no other file is left"


def test_a_reader_that_may_not_write_keeps_the_index_in_memory(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()
    write(tmp_path, [some_step(number) for number in range(STEPS)])
    history = History(tmp_path)
    history.complete()
    check(tmp_path, history)


def test_two_readers_do_not_write_the_index_at_the_same_time(tmp_path: Path) -> None:
    write(tmp_path, [some_step(number) for number in range(STEPS)])
    other = (tmp_path / f".{INDEX}.new").open("w")
    with other:
        fcntl.flock(other, fcntl.LOCK_EX)
        History(tmp_path).complete()
        assert not (tmp_path / INDEX).exists()
    assert len(index_of(tmp_path)) == STEPS // 4


def test_an_index_of_another_journal_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "a", [some_step(number, loss=1.0) for number in range(STEPS)])
    write(tmp_path / "b", [some_step(number, loss=2.0) for number in range(STEPS)])
    index_of(tmp_path / "a")
    (tmp_path / "b" / INDEX).write_bytes((tmp_path / "a" / INDEX).read_bytes())
    check(tmp_path / "b", History(tmp_path / "b"))


def test_a_long_journal_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where its index ends, and what a zoom asks for."""
    write(tmp_path, [some_step(number) for number in range(10 * STEPS)])
    index_of(tmp_path)
    scanned: list[int] = []
    scan = lines_module.scan  # type: ignore[attr-defined]
    monkeypatch.setattr(lines_module, "scan", lambda offset, data: scanned.append(len(data)) or scan(offset, data))
    history = History(tmp_path)
    assert sum(scanned) < 2000
    assert history.series(["loss"], points=10)["loss"]["step"] == [40 * each for each in range(10)]
    assert history.span() == (0, 10 * STEPS - 1)
    exact = history.series(["step_s"], 100, 103)["step_s"]
    assert exact["low"] == exact["high"] == [some_step(number).seconds.total() for number in range(100, 104)]


def test_without_an_index_a_journal_is_read_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overview is there at once, and what is missing of the rest is said."""
    monkeypatch.setattr(lines_module, "BUDGET_S", 0.0)
    write(tmp_path, [some_step(number) for number in range(10 * STEPS)])
    history = History(tmp_path)
    assert history.overview().step == 10 * STEPS - 1
    assert any("of it has not been read yet" in note for note in history.notes)
    history.complete()
    assert not any("not read yet" in note for note in history.notes)
    check(tmp_path, history)


# -- what is in the directory ------------------------------------------------------------------------


def test_a_run_that_was_resumed_from_a_checkpoint_is_seen_by_who_watches(tmp_path: Path) -> None:
    write(tmp_path, [some_step(number, loss=1.0) for number in range(STEPS)])
    history = History(tmp_path)
    assert history.overview().loss == 1.0
    truncate(tmp_path / JOURNAL, 10)
    journal = Journal(tmp_path / JOURNAL)
    journal.go_on_at(10)
    journal.start(writer=True)
    for number in range(10, 2 * STEPS):
        journal.emit(some_step(number, loss=2.0))
    history.refresh()
    check(tmp_path, history)
    overview = history.overview()
    assert (overview.step, overview.loss) == (2 * STEPS - 1, 2.0)
    assert max(point.high for point in overview.curve) == 2.0


def test_of_a_run_that_was_killed_and_resumed_the_last_part_has_its_own_place_and_time(tmp_path: Path) -> None:
    def came(worker_id: str, time: float, generation: int) -> WorkerJoined:
        about = {"host": "a", "device": "cpu", "pid": 7, "step": 0, "reason": "the run begins"}
        return WorkerJoined(time=time, worker_id=worker_id, generation=generation, **about)

    def members(time: float, generation: int, *worker_ids: str) -> MembershipChanged:
        return MembershipChanged(time=time, generation=generation, worker_ids=worker_ids)

    def start(time: float, step: int) -> RunStarted:
        return RunStarted(time=time, run_id="", directory="", step=step, recipe={})

    killed = [came("w0", 1000.0, 2), came("w9", 1000.0, 2), members(1000.0, 2, "w0", "w9"), start(1001.0, 0)]
    w1_gone = WorkerGone(time=9001.5, worker_id="w1", host="a", how="finished", reason="", step=-1)
    resumed = [came("w0", 9000.0, 1), came("w1", 9000.0, 1), members(9000.0, 1, "w0", "w1"), w1_gone, start(9002.0, 8)]
    steps = [step(number, time=(1010.0 if number < 8 else 9010.0) + number, loss=0.5) for number in range(12)]
    write(tmp_path, [*steps, end(time=9030.0)])
    lines = [line_of(each, run_id) for run_id, told in (("r1", killed), ("r2", resumed)) for each in told]
    (tmp_path / EVENTS_FILE).write_text("".join(f"{line}\n" for line in lines))
    history = History(tmp_path)
    overview = history.overview()
    assert (overview.started, overview.elapsed_s, overview.first, overview.step) == (9000.0, 30.0, 8, 11)
    assert {worker.worker_id for worker in overview.workers} == {"w0", "w1"}
    assert account(tmp_path).sentence.startswith("Finished 12 steps in 30.0 s (the last 4 steps)")
    told = [(each.worker_id, each.step, each.why_joined, each.gone) for each in history.past().workers]
    assert told == [
        ("w0", 0, "the run begins", 1001.0),
        ("w9", 0, "the run begins", 1001.0),
        ("w0", 8, "the run continues", 9030.0),
        ("w1", 8, "the run continues", 9001.5),
    ]
    shown = (
        CliRunner().invoke(cli._group, ["watch", "--once", str(tmp_path)], standalone_mode=False).output.splitlines()
    )
    w0, w9, again, w1 = (line for line in shown if " on a came " in line)
    assert all("at step 0 (the run begins); heard of last " in line for line in (w0, w9))
    assert all("at step 8 (the run continues)" in line for line in (again, w1))
    assert "after step" not in w1, "it went before a step"


def test_the_story_stays_in_its_order_whatever_the_clocks_of_hosts_say(tmp_path: Path) -> None:
    """The head says when a worker has joined, and a worker on another host when the first step after that was done."""
    write(tmp_path, [some_step(number) for number in range(12)])
    joined = WorkerJoined(
        time=1007.005, worker_id="w2", host="b", device="cpu", pid=7, generation=3, step=9, reason="replaces w1"
    )
    cost = Interruption(time=1007.0, generation=3, step=9, seconds=0.5, reason="w2 joins")
    (tmp_path / EVENTS_FILE).write_text("".join(f"{line_of(event, 'r1')}\n" for event in (joined, cost)))
    (found,) = History(tmp_path).past().interruptions
    assert (found.seconds, [each.worker_id for each in found.changes]) == (0.5, ["w2"])


def times(number: int, workers: Sequence[str]) -> dict[str, WorkerTimes]:
    """Return what is told with a step: its micro-batches, and the seconds of the step before."""
    last = Seconds(compute=0.5 + (number - 1) / 100, waiting=0.25)
    return {each: WorkerTimes(leaves=number, compute=0.1, last=last, waits_for="w0", waits_s=0.125) for each in workers}


def test_the_times_of_workers_are_with_the_step_that_they_are_about(tmp_path: Path) -> None:
    journal = write(tmp_path, [])
    for number in range(4):
        journal.emit(step(number, workers=times(number, ["w0", "w1"] if number < 2 else ["w0", "w10", "w2"])))
    found = History(tmp_path).times()
    assert found["workers"] == ["w0", "w1", "w2", "w10"]
    assert found["step"] == [0, 1, 2, 3]
    assert found["values"]["leaves"] == [[0, 0, None, None], [1, 1, None, None], [2, None, 2, 2], [3, None, 3, 3]]
    compute = [[0.5, 0.5, None, None], [0.51, None, None, None], [0.52, None, 0.52, 0.52], [0.1, None, 0.1, 0.1]]
    assert found["values"]["compute"][0] == compute[0]
    assert found["values"]["compute"][2:] == compute[2:]
    assert found["values"]["waiting"][3] == [None] * 4, "nobody has told it"
    assert found["waits_for"][2] == ["w0", None, "w0", "w0"]
    assert list(by_step(tmp_path)[2]) == ["w0", "w10", "w2"], "by rank"


def test_the_next_writer_tells_the_times_that_the_last_one_has_lost(tmp_path: Path) -> None:
    """It was killed before it wrote their lines: all members keep the newest."""
    first, second = write(tmp_path, []), Journal(tmp_path / JOURNAL)
    second.start(writer=False)
    for number in range(6):
        event = step(number, workers=times(number, ["w0", "w1"]))
        first.emit(event)
        second.emit(event)
    second.start(writer=True)  # the first one never came to write
    second.emit(step(6, workers=times(6, ["w1"])))
    assert {number: list(found) for number, found in by_step(tmp_path).items()} == {
        **{number: ["w0", "w1"] for number in range(6)},
        6: ["w1"],
    }


def test_times_after_a_checkpoint_are_taken_back_with_the_steps(tmp_path: Path) -> None:
    for begin, leaves in ((0, 1), (5, 2)):
        truncate(tmp_path / JOURNAL, begin)
        journal = Journal(tmp_path / JOURNAL)
        journal.go_on_at(begin)
        journal.start(writer=True)
        for number in range(begin, 8):
            journal.emit(step(number, workers={"w0": WorkerTimes(leaves=leaves)}))
    assert [found["w0"]["leaves"] for found in by_step(tmp_path).values()] == [1] * 5 + [2] * 3


def old_line(number: int) -> dict[str, Any]:
    """Return a line as an older version has written it."""
    line = to_line(some_step(number, loss=1.0 / (number + 1)))
    del line["time"]
    del line["seconds"]["network"], line["seconds"]["update"]
    last = {"data": 0.0, "compute": 0.5, "exchange": 0.0, "waiting": 0.1, "other": 0.0}
    return {"line": number, **line, "workers": {"w0": {"leaves": 4, "data": 0.1, "compute": 0.2, "last": last}}}


def test_the_journal_of_an_older_version_is_shown(tmp_path: Path) -> None:
    """It has what workers told in its lines, no times of day, and no index."""
    lines = [*map(old_line, range(STEPS)), {"line": STEPS, "kind": "end", "ok": True, "reason": "", "digests": {}}]
    (tmp_path / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = History(tmp_path)
    history.complete()
    check(tmp_path, history)
    overview = history.overview()
    assert (overview.state, overview.step, overview.loss) == ("finished", STEPS - 1, 1.0 / STEPS)
    assert overview.workers[0].worker_id == "w0"


def test_what_a_newer_version_has_written_is_shown_as_far_as_it_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, exact=100)
    lines: list[dict[str, Any]] = [{"line": n, **to_line(some_step(n)), "colour": "red"} for n in range(10)]
    lines[3]["seconds"] = [1, 2]
    lines[4]["loss"] = {"mean": 1.0}
    lines.insert(5, {"line": 99, "kind": "dance", "step": {"a": 1}})
    (tmp_path / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "schema": 7}))
    (tmp_path / "events.jsonl").write_text('{"time": 1.0, "kind": "sung", "song": 3}\n{"kind": 3}\nnonsense\n')
    history = History(tmp_path)
    loss = history.series(["loss"])["loss"]
    assert loss["step"] == list(range(10))
    assert loss["mean"] == [0.5] * 4 + ["nan"] + [0.5] * 5
    assert history.facts() == {"run_id": "r", "schema": 7}
    assert history.events() == {"events": [{"time": 1.0, "kind": "sung", "song": 3}], "next": 3}
    assert history.overview().step == 9
    notes = " ".join(history.notes)
    assert "run.json was written by a newer version (schema 7, this one knows 1)" in notes
    assert "events.jsonl is not an event: 'nonsense'" in notes


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty: no step is finished"),
        (b'{"line": 0, "ki', 'has no complete line yet: it begins with \'{"line": 0, "ki\''),
        (b"dear diary,\ntoday\n", "is not a journal: it begins with 'dear diary,'"),
        (b"\x00\x01\xff\xfe" * 999, "is not a journal: it begins with"),
        (b"\x00\x01\n\xff\xfe" * 999, "is not a journal: it begins with"),
        (b'{"a": 1}\n[2]\n7\n', "is not a journal: it begins with '{\"a\": 1}'"),
        (b"x" * 5000, "is not a journal: it begins with 'xxx"),
    ],
)
def test_what_is_no_journal_is_said(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(data)
    history = History(tmp_path)
    history.complete()
    assert any(said in note for note in history.notes), history.notes
    assert history.series(["loss"])["loss"]["step"] == []
    assert history.times()["step"] == []
    assert history.overview().step == -1


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    for name in (JOURNAL, "run.json", "events.jsonl"):
        (tmp_path / name).mkdir()
    for name in (TIMES, USE_FILE):
        (tmp_path / name).mkdir()
    history = History(tmp_path)
    assert history.overview().step == -1
    assert (history.times()["step"], history.use()["time"]) == ([], [])
    notes = " ".join(history.notes)
    assert all(f"{tmp_path / name} cannot be read: " in notes for name in (JOURNAL, "run.json", "events.jsonl"))


def test_a_line_without_an_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MOST_LINE_BYTES", 10_000)
    read_bytes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: read_bytes.append(size) or pread(file, size, at))
    (tmp_path / JOURNAL).write_bytes(b"x" * 1_000_000)
    history = History(tmp_path)
    history.complete()
    assert max(read_bytes) <= 10_000
    assert any("is not a journal: it begins with" in note for note in history.notes)


def test_an_index_that_says_impossible_things_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, [some_step(number) for number in range(STEPS)])
    blocks = index_of(tmp_path)
    lies = [
        [*blocks[:1], {"offset": -5, "end": 3, "lines": 2}, *blocks[1:]],
        [*blocks, {"offset": blocks[-1]["end"], "end": 1 << 60, "lines": 2}],
        blocks[1:],
        [{**each, "values": {**each["values"], "loss": [9.0, 9.0, 9.0, 4]}} for each in blocks],
        [{**each, "first": each["first"] + 1000} for each in blocks],
    ]
    for lie in lies:
        (tmp_path / INDEX).write_text("".join(json.dumps(block) + "\n" for block in lie))
        history = History(tmp_path)
        history.complete()
        check(tmp_path, history)


def test_broken_lines_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, [some_step(number) for number in range(6)])
    lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[2] = b"\x00" * 20 + b"\n"
    (tmp_path / JOURNAL).write_bytes(b"".join(lines))
    history = History(tmp_path)
    assert history.series(["loss"])["loss"]["step"] == [0, 1, 3, 4, 5]
    assert any("1 line of" in note and "cannot be read and is left out" in note for note in history.notes)


STRANGE: dict[str, list[Any]] = {
    "events": [
        {"time": "soon", "kind": "gone", "worker_id": "w0", "host": "a", "how": "lost", "reason": "", "step": 1},
        {"time": 2.0, "kind": "interruption", "generation": 2, "step": 4, "seconds": "long", "reason": ""},
        {"time": 3.0, "kind": "machine-gone"},
        {"time": 4.0, "kind": ["end"]},
        {"time": None, "kind": "sung"},
        [1],
    ],
    "facts": [
        [1],
        {"run_id": 5, "recipe": [1], "command": "python", "environment": 3},
        {"recipe": {"microbatches": "many", "batch_size": None}, "command": {"arguments": [None]}},
        {},
    ],
}
"""What other programs, or hands, may have written where a run writes something else."""


@pytest.mark.parametrize("facts", STRANGE["facts"])
def test_what_is_written_otherwise_than_a_run_writes_it_stops_nobody_who_looks_back(facts: Any, tmp_path: Path) -> None:
    run = make_long_run(tmp_path / "run", steps=300, workers=2)
    (run / "run.json").write_text(json.dumps(facts))
    with (run / EVENTS_FILE).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in STRANGE["events"])
        problem = Problem(time=5.0, problem="nan", text="the loss is nan", worker_id="w0", step=3, evidence="")
        file.write(line_of(problem, "long") + "\n")
    good = len(History(run).events()["events"])
    assert good == len((run / EVENTS_FILE).read_text().splitlines()) - len(STRANGE["events"])
    found = account(run)
    assert (found.overview.state, found.last) == ("finished", 299)
    assert any("is not an event" in note for note in found.notes)
    assert report([found], 0.0).startswith("<!doctype html>")
    shown = CliRunner().invoke(cli._group, ["watch", "--once", str(run)], standalone_mode=False)
    assert shown.exception is None
    assert shown.output.startswith("finished\n300 of 300 steps")


@pytest.mark.parametrize("name", [JOURNAL, EVENTS_FILE, "run.json", USE_FILE, TIMES, INDEX])
def test_what_is_nested_too_deep_is_no_line_and_ends_no_reader(name: str, tmp_path: Path) -> None:
    write(tmp_path, [some_step(number) for number in range(6)])
    with (tmp_path / name).open("a" if name != "run.json" else "w") as file:
        file.write(f'{{"line": 6, "kind": "step", "time": 1.0, "logs": {"[" * 100_000 + "]" * 100_000}}}\n')
    history = History(tmp_path)
    assert history.series(["loss"])["loss"]["step"] == [0, 1, 2, 3, 4, 5]
    assert (history.overview().step, history.events()["events"]) == (5, [])
    assert holder(tmp_path) in ("unknown, only a journal is left", "unreadable run.json")


def test_losses_near_the_largest_number_are_points_like_others(tmp_path: Path) -> None:
    write(tmp_path, [some_step(number, loss=1.7e308) for number in range(6)])
    for points in (1, 6):
        found = History(tmp_path).series(["loss"], points=points)["loss"]
        assert found["low"] == found["high"] == [1.7e308] * points
        assert all(math.isfinite(mean) for mean in found["mean"])


def test_a_journal_that_ends_before_its_run_is_said(tmp_path: Path) -> None:
    run = make_long_run(tmp_path / "run", steps=300, workers=2)
    assert History(run).notes == []
    lines = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    (run / JOURNAL).write_bytes(b"".join(lines[:100]))
    history = History(run)
    assert history.overview().state == "finished"
    (note,) = history.notes
    assert note.startswith(f"{run / JOURNAL} ends with step 99, and the run ended after step 299: ")


def test_a_run_whose_processes_were_all_killed_is_not_said_to_wait(tmp_path: Path) -> None:
    run = make_long_run(tmp_path / "run", steps=300, workers=2, ended=False)
    overview = History(run).overview()
    assert (overview.state, overview.step, overview.left_s) == ("unknown", 299, None)
    assert "the run was killed, or continues where it cannot be seen from here" in overview.reason
    assert account(run).sentence.startswith("Ended after 300 steps")
    lock = Lock()
    lock.take(run, "long")
    try:
        assert History(run).overview().state == "waiting", "a process of the run is there"
    finally:
        lock.release()


def test_a_run_that_failed_in_its_first_steps_gets_no_advice(tmp_path: Path) -> None:
    assert not account(make_long_run(tmp_path / "short", steps=9, workers=2)).advice
    assert account(make_long_run(tmp_path / "long", steps=40, workers=2)).advice


def test_a_run_that_is_over_has_the_name_of_its_script(tmp_path: Path) -> None:
    for arguments, name in ((["train.py", "--lr", "1"], "train.py"), (["-m", "training"], "-m training")):
        (tmp_path / "run.json").write_text(json.dumps({"command": {"folder": "/", "arguments": arguments}}))
        assert History(tmp_path).overview().script == name


def test_an_empty_place_is_an_empty_history(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        history = History(place)
        assert history.span() == (0, -1)
        assert (history.names(), history.facts()) == ([], {})
        assert history.events() == {"events": [], "next": 0}
        assert history.use() == {"time": [], "machines": {}}
        assert history.times()["workers"] == []
        assert history.overview().step == -1
        assert any(f"there is no {place / JOURNAL}" in note for note in history.notes)


# -- a long run --------------------------------------------------------------------------------------


def test_a_run_is_shown_as_it_was(tmp_path: Path) -> None:
    history = History(make_long_run(tmp_path / "run", steps=6000, workers=9))
    history.complete()
    overview = history.overview()
    assert (overview.state, overview.step, overview.run_id) == ("finished", 5999, "long")
    assert {worker.worker_id for worker in overview.workers} >= {"w0", "w9"}
    assert overview.workers[0].waits_for == "w8"
    assert history.notes == []
    used = history.use(points=20)
    assert used["machines"]["node1"]["num_cores"] == 16
    assert len(used["time"]) == len(used["machines"]["node0"]["cores"]) <= 60
    events = history.events(after=-3)
    assert [event["kind"] for event in events["events"]] == ["joined", "membership", "end"]
    assert history.events(after=events["next"]) == {"events": [], "next": events["next"]}
    assert history.events(after=1, most=2)["next"] == 3


def test_a_million_steps_of_64_workers_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    """By the line, and by what the newest records may take at most."""
    steps = 2000
    run = make_long_run(tmp_path / "run", steps=steps, workers=64)
    index_of(run)
    by_line = sum((run / name).stat().st_size for name in (JOURNAL, INDEX)) / steps
    assert 0 < (run / TIMES).stat().st_size <= MOST_BYTES
    assert 0 < earlier(run / TIMES).stat().st_size <= MOST_BYTES
    assert by_line * 1_000_000 + 4 * MOST_BYTES < 1e9


def test_the_end_of_a_run_whose_members_are_gone_is_seen(tmp_path: Path) -> None:
    write(tmp_path, [some_step(0)])
    history = History(tmp_path)
    assert history.overview().state != "failed"
    conclude(tmp_path, "all are gone")
    history.refresh()
    assert (history.overview().state, history.overview().reason) == ("failed", "all are gone")


def lines_of(events: Sequence[LineEvent]) -> Iterator[str]:
    for number, event in enumerate(events):
        yield text_of({"line": number, **to_line(event)}) + "\n"


def test_a_journal_by_itself_is_a_history(tmp_path: Path) -> None:
    """Wherever it lies, and whatever its name is."""
    path = tmp_path / "old.jsonl"
    path.write_text("".join(lines_of([*map(some_step, range(5)), end()])))
    history = History(path)
    assert history.span() == (0, 4)
    assert history.overview().state == "finished"


def test_every_event_is_yielded_also_after_a_page_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story_module, "EVENTS_AT_ONCE", 2)
    texts = [
        '{"time": 1.0, "kind": "sung", "number": 0}',
        "broken",
        "broken",
        *(f'{{"time": 1.0, "kind": "sung", "number": {n}}}' for n in (1, 2)),
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{text}\n" for text in texts))
    assert [each["number"] for each in History(tmp_path).every_event()] == [0, 1, 2]


def test_a_point_counts_as_many_steps_as_it_is_a_mean_of() -> None:
    assert steps_of({"step": [0, 64, 72, 73]}, last=74) == [64, 8, 1, 2]
    assert steps_of({"step": []}, last=-1) == []


def test_the_status_says_where_a_run_stands_that_has_no_head(tmp_path: Path) -> None:
    def status(name: str, *told: LineEvent) -> dict[str, Any]:
        return History(run_with(tmp_path / name, *told)).status()

    assert status("empty")["state"] == "unknown"
    stopped = status("stopped", step(0), step(1), evaluation(2, n=1))
    assert (stopped["state"], stopped["step"], stopped["num_steps"], stopped["loss"]) == ("stopped", 1, 9, 0.25)
    finished = status("finished", step(0), end())
    assert (finished["state"], finished["digests"]) == ("finished", {"model": "5f3a"})
    failed = status("failed", step(0), end(False, reason="KeyError: 3"))
    assert (failed["state"], failed["reason"]) == ("failed", "KeyError: 3")
