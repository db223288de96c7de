"""Traces of several workers become one: on one clock, each worker a process with its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unisono.record.traces import ABOUT, About, TracePart, main, merge, part_name

BASE_NS = 1_700_000_000_000_000_000


def put(folder: Path, worker_id: str, *, pid: int, later_us: float = 0.0, base_ns: int = BASE_NS) -> None:
    """The trace of a worker with one operation, which begins so long after the base."""
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "pid": "Spans", "tid": 0, "ts": 1.0, "args": {"name": "Spans"}},
        {"ph": "X", "name": "step 3", "pid": pid, "tid": pid, "ts": later_us, "dur": 100.0},
        {"ph": "s", "name": "fwdbwd", "id": 7, "pid": pid, "tid": pid, "ts": later_us},
    ]
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / part_name(worker_id), "wt") as file:
        json.dump({"baseTimeNanoseconds": base_ns, "traceEvents": events}, file)


def describe(folder: Path, *parts: TracePart) -> None:
    (folder / ABOUT).write_bytes(msgspec.json.encode(About(first=3, stop=5, parts=list(parts))))


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def test_workers_with_the_same_process_id_and_other_clocks_are_told_apart(tmp_path: Path) -> None:
    """Two containers: both have process 7. The clock of the second is an hour ahead."""
    folder, target = tmp_path / ".steps", tmp_path / "steps.json.gz"
    put(folder, "w0", pid=7, later_us=50.0)
    put(folder, "w1", pid=7, later_us=20.0, base_ns=BASE_NS + 3600 * 10**9)
    describe(
        folder,
        TracePart(worker_id="w0", host="m1", pid=7),
        TracePart(worker_id="w1", host="m2", pid=7, ahead_s=3600.0, error_s=1e-4),
    )
    assert merge(folder, target) == ["w0", "w1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.json.gz"]
    trace = read(target)
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 4
    assert [names[event["pid"]] for event in events if event["name"] == "step 3"] == ["w0 on m1", "w1 on m2"]
    assert {"w0: Spans", "w1: Spans"} < set(names.values())
    began = [event["ts"] for event in events if event["name"] == "step 3"]
    assert began == pytest.approx([50.0, 20.0], abs=0.5)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2, "arrows do not lead to other workers"
    assert trace["baseTimeNanoseconds"] == BASE_NS
    assert trace["unisono"]["workers"][1]["error_s"] == 1e-4


@pytest.mark.parametrize(
    "broken",
    [b"", b"no gzip", gzip.compress(b"{}", mtime=0), gzip.compress(b"[1]", mtime=0)],
    ids=["empty", "no gzip", "no trace", "a list"],
)
def test_a_trace_that_is_broken_is_left_out(broken: bytes, tmp_path: Path) -> None:
    folder, target = tmp_path / ".steps", tmp_path / "steps.json.gz"
    put(folder, "w1", pid=8)
    (folder / part_name("w0")).write_bytes(broken)
    describe(folder, *(TracePart(worker_id=name, host="m1", pid=7) for name in ("w0", "w1", "w2")))
    assert merge(folder, target) == ["w1"]
    assert [event["name"] for event in read(target)["traceEvents"]].count("step 3") == 1


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ".steps"
    folder.mkdir()
    describe(folder, TracePart(worker_id="w0", host="m1", pid=7))
    assert main(str(folder), str(tmp_path / "steps.json.gz")) == 1
    assert "could not be written" in capsys.readouterr().err
