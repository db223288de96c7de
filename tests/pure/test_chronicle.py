"""The file of a run's events: one process writes it, the next one goes on, nothing is told twice, and nobody waits."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.waiting import WAIT_S, wait_until
from unisono.core.events import Announcement, MachineUsed, RunEnded, RunStarted, WorkerGone
from unisono.record import chronicle
from unisono.record.chronicle import Chronicle, line_of
from unisono.record.history.machines import read_use
from unisono.record.rundir import EVENTS_FILE, USE_FILE, describe


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle, "FIRST_S", 0.01)
    monkeypatch.setattr(chronicle, "OTHERS_S", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    describe(tmp_path, {"run_id": "r1"})
    return tmp_path


def said(number: int) -> Announcement:
    return Announcement(time=1e9 + number, number=number, head="1", text=f"number {number}")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVENTS_FILE).read_text().splitlines()]


def texts(run: Path) -> list[str]:
    return [line["text"] for line in lines(run)]


def wait_for(run: Path, number: int) -> None:
    """Until the file has so many lines."""
    pause, left = threading.Event(), WAIT_S
    while left > 0 and (not (run / EVENTS_FILE).exists() or len(lines(run)) < number):
        pause.wait(0.01)
        left -= 0.01
    assert len(lines(run)) == number


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes chronicles, and closes them."""
    found: list[Chronicle] = []

    def make(*arguments: Any) -> Chronicle:
        found.append(Chronicle(*arguments))
        return found[-1]

    yield make
    for each in found:
        each.close()


def test_a_line_has_the_time_first_the_kind_and_the_run(run: Path, made: Any) -> None:
    told = made()
    gone = WorkerGone(time=17.25, worker_id="w1", host="a", how="lost", reason="killed", step=4)
    told.tell(gone)
    told.write_to(run, "r1")
    told.close()
    (line,) = lines(run)
    assert list(line)[:3] == ["time", "kind", "run_id"]
    assert line == {
        "time": 17.25, "kind": "gone", "run_id": "r1", "worker_id": "w1", "host": "a", "how": "lost",
        "reason": "killed", "step": 4,
    }  # fmt: skip


def test_what_is_told_before_the_directory_is_known_is_written_then(run: Path, made: Any) -> None:
    told = made()
    for number in range(3):
        told.tell(said(number))
    told.write_to(run, "r1")
    wait_for(run, 3)
    told.tell(said(3))
    wait_for(run, 4)
    assert texts(run) == [f"number {number}" for number in range(4)]


def test_one_writes_and_when_it_is_gone_the_next_one_appends_what_is_missing(run: Path, made: Any) -> None:
    first, second = made(), made(lambda: False)
    for each in (first, second):
        each.tell(said(0))
    first.write_to(run, "r1")
    wait_for(run, 1)
    second.write_to(run, "r1")
    for number in (1, 2):
        for each in (first, second):
            each.tell(said(number))
    wait_for(run, 3)
    assert (first.writes, second.writes) == (True, False)
    second.tell(said(3))  # which the first one has not heard before it ends
    first.close()
    wait_for(run, 4)
    assert second.writes
    second.tell(said(4))
    wait_for(run, 5)
    assert texts(run) == [f"number {number}" for number in range(5)]


def test_a_fork_that_lives_longer_does_not_keep_the_others_from_writing(run: Path, made: Any) -> None:
    """Of a script, or of what a script has started."""
    first, second = made(), made()
    first.write_to(run, "r1")
    first.tell(said(0))
    wait_for(run, 1)
    waits, goes_on = os.pipe()
    if (child := os.fork()) == 0:
        os.close(goes_on)
        os.read(waits, 1)
        os._exit(0)
    try:
        first.close()
        second.tell(said(1))
        second.write_to(run, "r1")
        wait_for(run, 2)
    finally:
        os.close(goes_on)
        os.close(waits)
        os.waitpid(child, 0)


def test_another_run_s_directory_is_not_written(run: Path, made: Any) -> None:
    told = made()
    told.tell(said(0))
    told.write_to(run, "another")
    told.close()
    assert not (run / EVENTS_FILE).exists()


def test_a_directory_that_is_taken_away_is_written_again_when_it_is_back(run: Path, made: Any, tmp_path: Path) -> None:
    run = tmp_path / "inner"
    run.mkdir()
    describe(run, {"run_id": "r1"})
    told = made()
    told.write_to(run, "r1")
    told.tell(said(0))
    wait_for(run, 1)
    run.rename(tmp_path / "away")
    told.tell(said(1))
    (tmp_path / "away").rename(run)
    wait_for(run, 2)


def test_half_a_line_of_a_killed_process_is_cut_off(run: Path, made: Any) -> None:
    whole = line_of(said(0), "r1") + "\n"
    (run / EVENTS_FILE).write_text(whole + '{"time": 17, "ki')
    told = made()
    told.tell(said(0))
    told.tell(said(1))
    told.write_to(run, "r1")
    told.close()
    assert texts(run) == ["number 0", "number 1"]


def test_a_run_that_goes_on_appends_and_its_lines_have_its_name(run: Path, made: Any) -> None:
    for run_id, step in (("r1", 0), ("r2", 20)):
        describe(run, {"run_id": run_id})
        told = made()
        told.tell(RunStarted(time=1.0, run_id=run_id, directory=str(run), step=step, recipe={}))
        told.tell(RunEnded(time=2.0, ok=True, reason="finished", digests={}, step=step + 19))
        assert told.has_end
        told.write_to(run, run_id)
        told.close()
    found = [(line["kind"], line["run_id"]) for line in lines(run)]
    assert found == [("start", "r1"), ("end", "r1"), ("start", "r2"), ("end", "r2")]


def test_a_full_disk_costs_nobody_time_and_what_was_lost_is_named(
    run: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chronicle, "KEPT", 3)
    is_full = True
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if is_full and b"number" in bytes(data):
            write(descriptor, bytes(data)[:5])  # half a line fits
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    told = made()
    told.write_to(run, "r1")
    for number in range(8):
        told.tell(said(number))
    is_full = False
    wait_for(run, 4)
    gap, *rest = lines(run)
    assert (gap["kind"], gap["first"], gap["last"]) == ("gap", 1, 5)
    assert [line["text"] for line in rest] == ["number 5", "number 6", "number 7"]


def test_a_disk_that_stands_still_does_not_hold_up_the_end(
    run: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chronicle, "CLOSE_S", 0.05)
    stands, went_on = threading.Event(), threading.Event()
    write = os.write

    def hangs(descriptor: int, data: Any) -> int:
        if b"number" in bytes(data):
            stands.set()
            went_on.wait(WAIT_S)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", hangs)
    told = Chronicle()
    told.write_to(run, "r1")
    told.tell(said(0))
    assert stands.wait(WAIT_S)
    thread = told._thread
    told.tell(said(1))
    told.close()
    assert thread is not None
    assert thread.is_alive(), "the disk still stands"
    went_on.set()
    thread.join(WAIT_S)


def test_who_joins_another_side_of_the_run_lets_others_write_and_forgets(
    run: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chronicle, "OTHERS_S", WAIT_S)
    first, second = made(), made()
    first.write_to(run, "r1")
    first.tell(said(0))
    wait_for(run, 1)
    second.tell(said(1))
    second.write_to(run, "r1")
    first._is_first = lambda: False
    first.leave()
    wait_for(run, 2)
    assert texts(run) == ["number 0", "number 1"]


def test_the_next_writer_knows_by_their_numbers_what_another_one_has_written(run: Path, made: Any) -> None:
    """Also events that it hears of only now. What has no number, only it has told."""
    own = Announcement(time=5.0, text="this machine runs the next head")
    lines_of_others = [line_of(said(number), run_id) for number, run_id in ((7, "r0"), (0, "r1"), (1, "r1"))]
    (run / EVENTS_FILE).write_text("".join(f"{line}\n" for line in lines_of_others))
    told = made()
    told.tell(said(0))
    told.tell(own)
    told.write_to(run, "r1")
    wait_for(run, 4)
    for event in (said(1), said(2), msgspec.structs.replace(said(0), head="2")):
        told.tell(event)
    wait_for(run, 6)
    assert texts(run)[3:] == [own.text, "number 2", "number 0"]


def test_who_joins_another_side_while_lines_are_written_has_lost_none_there(
    run: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that did not fit were said to be lost with the ones that are being written: not once more later."""
    monkeypatch.setattr(chronicle, "KEPT", 3)
    told = made()
    append = chronicle._File.append

    def leaves_meanwhile(file: Any, written: Any) -> bool:
        found = append(file, written)
        if not told._leaves:
            told.leave()
        return found

    monkeypatch.setattr(chronicle._File, "append", leaves_meanwhile)
    for number in range(5):
        told.tell(said(number))
    told.write_to(run, "r1")
    wait_for(run, 4)  # the lost ones, and three
    monkeypatch.setattr(chronicle._File, "append", append)
    told.tell(said(5))
    wait_for(run, 5)
    assert [line["kind"] for line in lines(run)] == ["gap"] + 4 * ["announcement"]


def use(host: str, time: float) -> MachineUsed:
    return MachineUsed(
        time=time, host=host, cores=1.5, num_cores=4, memory_bytes=1, memory_total_bytes=2, sent_bytes_per_s=0.0,
        received_bytes_per_s=0.0,
    )  # fmt: skip


def test_what_machines_use_is_written_now_and_then_and_at_the_end_by_the_one_that_writes(run: Path, made: Any) -> None:
    first, second = made(), made(lambda: False)
    first.tell(said(0))
    first.write_to(run, "r1")
    wait_for(run, 1)
    second.write_to(run, "r1")
    first.use([use("a", 100.0)])
    first.tell(said(1))
    wait_until(lambda: (run / USE_FILE).exists() and bool(list(read_use(run / USE_FILE))), "the first use is written")
    for at in range(101, 109):
        for each in (first, second):
            each.use([use("a", float(at)), use("b", at + 0.5)])
    first.close()
    found = [[(each.host, each.time) for each in used] for used in read_use(run / USE_FILE)]
    assert found[0][0] == ("a", 100.0)
    assert found[-1] == [("a", 108.0), ("b", 108.5)]
    assert len(found) <= 3
