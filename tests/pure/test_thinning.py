"""Thinned records: the newest in full, older ones as means, in a bounded room; whoever dies while writing."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_S
from unisono.journal import thinning
from unisono.journal.levels import FOLD
from unisono.journal.ranges import newest, read
from unisono.journal.rows import Row, mean_of
from unisono.journal.thinning import Thinned


def write(directory: Path, keys: range, **header: Any) -> None:
    thinned = Thinned(directory, header)
    for key in keys:
        thinned.add(key, {"x": float(key)})
    thinned.close()


def keys_of(rows: list[Row]) -> list[tuple[float, float, int]]:
    return [(row.first, row.last, row.count) for row in rows]


# -- what is kept ------------------------------------------------------------------------------------


def test_few_records_are_kept_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "times", range(20), columns=["x"])
    header, rows, notes = read(tmp_path / "times")
    assert header == {"columns": ["x"]}
    assert rows == [Row(key, key, 1, {"x": float(key)}) for key in range(20)]
    assert notes == []
    assert newest(tmp_path / "times", 3).rows == rows[-3:]


@pytest.mark.parametrize("points", [1, 10, 100, 500])
def test_a_question_is_answered_with_about_so_many_rows_for_all_records(points: int, tmp_path: Path) -> None:
    write(tmp_path / "times", range(1000))
    rows = read(tmp_path / "times", points=points).rows
    assert len(rows) <= 2 * points + 2 * FOLD
    assert [row.first for row in rows[1:]] == [row.last + 1 for row in rows[:-1]]
    assert (rows[0].first, rows[-1].last, sum(row.count for row in rows)) == (0, 999, 1000)
    for row in rows:
        assert row.record["x"] == pytest.approx((row.first + row.last) / 2)


def test_a_zoom_shows_more(tmp_path: Path) -> None:
    write(tmp_path / "times", range(1000))
    rows = read(tmp_path / "times", 500, 539, points=50).rows
    assert keys_of(rows) == [(key, key, 1) for key in range(500, 540)]


def test_old_records_get_coarser_and_the_room_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(thinning, "LEVEL_BYTES", 4000)
    levels = thinning._Levels(tmp_path / "times", {})
    for key in range(20_000):
        levels.add(key, {"x": 1.0})
        if key % 10 == 0:
            levels.write()
    levels.write()
    levels.close()
    sizes: dict[str, int] = {}
    for path in (tmp_path / "times").glob("*-*.jsonl"):
        level = path.name.partition("-")[0]
        sizes[level] = sizes.get(level, 0) + path.stat().st_size
    assert max(sizes.values()) < 4000 + 2 * 1000
    rows = read(tmp_path / "times", points=100_000).rows
    assert sum(row.count for row in rows) == 20_000, "nothing is forgotten"
    counts = [row.count for row in rows]
    assert counts == sorted(counts, reverse=True)
    assert set(counts) >= {1, FOLD, FOLD**2}


def test_means_are_of_what_there_is() -> None:
    """A worker that was not there is not counted, and names are not averaged."""
    rows = [
        Row(0, 0, 1, {"w": {"w0": [1, 2.0], "w1": [3, 4.0]}, "name": "w1", "ok": True, "odd": [1]}),
        Row(1, 1, 1, {"w": {"w0": [3, None]}, "name": "w2", "ok": False, "odd": [1, 2]}),
    ]
    assert mean_of(rows) == Row(
        0, 1, 2, {"w": {"w0": [2.0, 2.0], "w1": [3.0, 4.0]}, "name": "w2", "ok": False, "odd": [1, 2]}
    )


def test_means_of_means_are_weighted() -> None:
    assert mean_of([Row(0, 7, 8, {"x": 1.0}), Row(8, 8, 1, {"x": 10.0})]).record == {"x": 2.0}


# -- any writer, any death ---------------------------------------------------------------------------


@given(st.data())
def test_what_is_read_is_what_was_added_and_not_taken_back(data: st.DataObject) -> None:
    """Whatever writers come one after the other, and wherever one is cut off while it writes."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "times"
        there: dict[int, float] = {}
        key, is_whole = 0, True
        for _ in range(data.draw(st.integers(1, 5))):
            levels = thinning._Levels(directory, {})
            if there and data.draw(st.booleans()):
                key = data.draw(st.integers(0, key))
                levels.cut(key)
                there = {each: value for each, value in there.items() if each < key}
            for _ in range(data.draw(st.integers(0, 30))):
                there[key] = float(data.draw(st.integers(0, 100)))
                levels.add(key, {"x": there[key]})
                key += 1
                if data.draw(st.integers(0, 9)) == 0:
                    levels.write()
            levels.write()
            levels.close()
            paths = sorted(directory.glob("*-*.jsonl")) if directory.exists() else []
            if paths and data.draw(st.booleans()):
                is_whole = False
                torn = data.draw(st.sampled_from(paths))
                os.truncate(torn, max(0, torn.stat().st_size - data.draw(st.integers(1, 60))))
        points = data.draw(st.sampled_from([1, 3, 10, 1000]))
        rows = read(directory, points=points).rows
        for row, after in itertools.pairwise(rows):
            assert row.last < after.first
        for row in rows:
            known = [value for each, value in there.items() if row.first <= each <= row.last]
            assert known, "what was taken back is not told"
            if is_whole:
                assert row.count == len(known)
                assert row.record["x"] == pytest.approx(sum(known) / len(known), abs=1e-4)
        if is_whole:
            assert sum(row.count for row in rows) == len(there)


def test_what_is_broken_or_newer_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path / "times", range(10))
    path = tmp_path / "times" / "0-000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"schema":1', b'"schema":7')
    lines[4] = b"\x00\xff nonsense\n"
    path.write_bytes(b"".join(lines))
    header, rows, notes = read(tmp_path / "times")
    assert header == {}
    assert [row.first for row in rows] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert notes == [
        f"{tmp_path / 'times'} was written by a newer version (schema 7, this one knows 1); what this version does not "
        "know is left out",
        f"1 of 10 lines of {path} are broken and left out",
    ]


# -- disks -------------------------------------------------------------------------------------------


def test_a_disk_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    thinned = Thinned(tmp_path / "file" / "times", report=said.append)
    for key in range(3):
        thinned.add(key, {"x": 1.0})
        assert not thinned.flush(0.01) or key
    thinned.add(4, {"x": object()})
    thinned.close()
    (text,) = said
    assert text.startswith(f"{tmp_path / 'file' / 'times'} cannot be written: [Errno 20]")
    assert "; training goes on" in text


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    """Who writes the journal says that it is gone."""
    said: list[str] = []
    thinned = Thinned(tmp_path / "not here" / "times", report=said.append)
    thinned.add(0, {"x": 1.0})
    thinned.close()
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_there_again_is_written_again(tmp_path: Path) -> None:
    thinned = Thinned(tmp_path / "later" / "times", report=lambda text: None)
    thinned.add(0, {"x": 1.0})
    thinned.flush(0.01)
    (tmp_path / "later").mkdir()
    thinned.cut(0)
    thinned.add(1, {"x": 2.0})
    assert thinned.flush(WAIT_S)
    thinned.close()
    assert [row.first for row in read(tmp_path / "later" / "times").rows][-1] == 1


def test_a_disk_that_stands_still_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody reads stands for it."""
    monkeypatch.setattr(thinning, "MOST_WAITING", 10)
    monkeypatch.setattr(thinning, "CLOSE_S", 0.05)
    (tmp_path / "times").mkdir()
    pipe = tmp_path / "times" / "0-000000.jsonl"
    os.mkfifo(pipe)
    said: list[str] = []
    thinned = Thinned(tmp_path / "times", report=said.append)
    for key in range(50):
        thinned.add(key, {"x": "x" * 100})
    thread = thinned._thread
    assert thread is not None
    thinned.close()
    assert thread.is_alive(), "it still waits, and nobody waits for it"
    assert said == [
        f"{tmp_path / 'times'} cannot be written: the disk takes nothing; training goes on, and what a view would show "
        "from there is missing"
    ]
    deadline = time.monotonic() + WAIT_S
    while thread.is_alive():
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(0.01)


def test_what_is_never_used_starts_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Thinned(tmp_path / "times").close()
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_records_of_another_form_are_not_mixed(tmp_path: Path) -> None:
    """A newer version goes on with the run, and has other columns."""
    write(tmp_path / "times", range(5), columns=["x"])
    write(tmp_path / "times", range(5, 9), columns=["y", "x"])
    header, rows, notes = read(tmp_path / "times")
    assert header == {"columns": ["y", "x"]}
    assert [row.first for row in rows] == [5, 6, 7, 8]
    (note,) = notes
    assert "written by another version: their header differs" in note


def test_many_writers_leave_few_files(tmp_path: Path) -> None:
    """In a run that loses workers all the time: each of them takes back what the last one may have lost."""
    for turn in range(30):
        levels = thinning._Levels(tmp_path / "times", {})
        levels.cut(max(0, 5 * turn - 3))
        for key in range(max(0, 5 * turn - 3), 5 * turn + 5):
            levels.add(key, {"x": float(turn)})
        levels.write()
        levels.close()
    assert sorted(path.name for path in (tmp_path / "times").iterdir()) == [
        "0-000000.jsonl", "1-000000.jsonl", "2-000000.jsonl", "cuts.jsonl",
    ]  # fmt: skip
    rows = read(tmp_path / "times").rows
    assert [row.first for row in rows] == list(range(150))
    assert [row.record["x"] for row in rows[:14]] == [0.0] * 2 + [1.0] * 5 + [2.0] * 5 + [3.0] * 2
