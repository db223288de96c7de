"""Weights & Biases, offline: the files of a run have every step, whoever was killed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2  # here: it makes folders that stay, and a test may leave none

from tests.pure.test_journal import end, evaluation, step
from tests.waiting import wait_until
from tests.watch.next_writer import STEPS, run_with_a_killed_writer
from tests.workers.conftest import Unisono
from unisono.core.events import RunStarted
from unisono.record.journal import JOURNAL, Journal, read
from unisono.views.watch.charts import ToolBookmark
from unisono.views.watch.wandb import WandB


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))


def files(run_dir: Path) -> list[Path]:
    """The files of a run, one for each time that somebody began to log, in their order."""
    return sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)


def num_logged(run_dir: Path) -> int:
    """How many steps the sink has given to the package by now."""
    return int(ToolBookmark(str(run_dir), "wandb").read().get("steps", 0))


BLOCK, HEADER, FILE_HEADER = 32768, struct.Struct("<IHB"), 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> list[Any]:
    """What is in a file, which is a log in the format of LevelDB. A record that was not complete when its writer was
    killed is left out, as `wandb sync` does.
    """
    data, found, whole, place = path.read_bytes(), [], b"", FILE_HEADER
    while place + HEADER.size <= len(data):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK  # the rest of a block is empty
            continue
        _, size, kind = HEADER.unpack_from(data, place)
        part = data[place + HEADER.size : place + HEADER.size + size]
        place += HEADER.size + size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(part) < size:
            break
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(whole))
    return found


def history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def ids(run_dir: Path) -> set[str]:
    return {
        record.run.run_id
        for path in files(run_dir)
        for record in records(path)
        if record.WhichOneof("record_type") == "run"
    }


def test_the_files_have_every_step_with_its_numbers_and_the_recipe(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    sink = WandB()
    sink.emit(RunStarted(run_id="r1", directory=str(run_dir), step=0, recipe={"seed": 3}))
    for number in range(4):
        sink.emit(step(number, time=1e9 + number, logs={"lr": 0.5}))
        if number % 2:
            sink.emit(evaluation(number + 1, right=number))
    wait_until(lambda: num_logged(run_dir) == 4, "its process logs")  # its end is not waited for as long
    sink.emit(end())
    sink.close()
    (path,) = files(run_dir)
    rows = history(path)
    assert [row["_step"] for row in rows] == list(range(5))
    assert [row["loss"] for row in rows[:4]] == [0.5 / (number + 1) for number in range(4)]
    assert [row["log/lr"] for row in rows[:4]] == [0.5] * 4
    assert [row.get("evaluation/right") for row in rows] == [None, None, 1, None, 3]
    config = next(record.run.config for record in records(path) if record.WhichOneof("record_type") == "run")
    assert {item.key: item.value_json for item in config.update}["seed"] == "3"


def test_the_next_writer_and_a_resumed_run_go_on_under_the_same_id(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    journal = Journal(run_dir / JOURNAL)
    journal.start(writer=True)
    for first, last in ((0, 3), (5, 7)):
        sink = WandB()
        sink.emit(RunStarted(run_id="r1", directory=str(run_dir), step=first, recipe={"seed": 3, "steps": last}))
        for number in range(first, last):
            sink.emit(journal.emit(step(number)))
        wait_until(lambda last=last: num_logged(run_dir) == last, "its process logs")
        sink.close()
        for number in range(3, 5) if first == 0 else ():
            journal.emit(step(number))  # the worker was lost before its sink had these
    assert len(ids(run_dir)) == 1
    assert [[row["_step"] for row in history(path)] for path in files(run_dir)] == [[0, 1, 2], [3, 4, 5, 6]]


@pytest.mark.usefixtures("nursery")
def test_the_example_logs_every_step_although_the_writer_is_killed(
    unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_with_a_killed_writer("log_to_wandb.py", unisono, tmp_path, lambda: num_logged(run_dir), monkeypatch)
    losses = [line["loss"] for line in read(run_dir) if line["kind"] == "step"]
    found = {row["_step"]: row["loss"] for path in files(run_dir) for row in history(path) if "loss" in row}
    assert len(losses) == STEPS
    assert found == dict(enumerate(losses))
    assert len(ids(run_dir)) == 1
