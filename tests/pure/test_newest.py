"""The newest records are whole, and older ones go."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.record.journal import newest
from unisono.record.journal.newest import Newest, earlier, newest_first


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "MOST_RECORDS", 10)


def records(path: Path) -> list[int]:
    return [int(text) for text in newest_first(path)][::-1]


def test_the_newest_records_are_kept_and_older_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "of.jsonl"
    assert records(path) == []
    for number in range(47):
        Newest(path).add([b"%d" % number])  # each writer begins where the last one has ended
        kept = records(path)
        assert kept == list(range(kept[0], number + 1))
        assert min(number + 1, 10) <= len(kept) <= 20
    assert {each.name for each in tmp_path.iterdir()} == {"of.jsonl", "of.before.jsonl"}


def test_records_that_are_large_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "MOST_BYTES", 30)
    path = tmp_path / "of.jsonl"
    writer = Newest(path)
    for number in range(20):
        writer.add([b"%08d" % number])
        assert path.stat().st_size <= 30
    assert records(path) == [15, 16, 17, 18, 19]
    writer.add([b"0" * 99])
    writer.add([b"1"])
    assert [path.stat().st_size, earlier(path).stat().st_size] == [2, 100]


def test_half_a_record_of_a_writer_that_was_killed_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "of.jsonl"
    path.write_bytes(b"1\n22")
    assert [*newest_first(path)] == [b"1\n"]
    Newest(path).add([b"3", b"4"])
    assert [*newest_first(path)] == [b"4\n", b"3\n", b"22\n", b"1\n"]
