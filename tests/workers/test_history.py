"""The history of a run, read by another process while the run goes on and loses its writer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.cli.reach import ask_status, find
from unisono.record.history import History
from unisono.record.journal import read

pytestmark = pytest.mark.more

TRAINING = Path(__file__).with_name("small_training.py")
STEPS = 150
BEFORE, AFTER = 70, 140


def seen(history: History, what: Callable[[], bool]) -> None:
    """Look at a run until it shows something."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, (history.span(), history.times(), history.notes)
        time.sleep(0)
        history.refresh()


@pytest.mark.usefixtures("nursery")
def test_a_run_that_loses_its_writer_is_seen_while_it_trains(unisono: Unisono, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (BEFORE, AFTER)) as gates:
        options = ["-n", 2, "--run-dir", run_dir, *PATIENT, "--", "--steps", STEPS, "--gates", gates.folder]
        command = unisono("run", TRAINING, *options)
        gates.wait(BEFORE, workers=2)
        history = History(run_dir)
        seen(history, lambda: history.times()["step"][-1:] == [BEFORE - 1])
        assert history.span() == (0, BEFORE - 1)
        assert history.times()["workers"] == ["w0", "w1"]
        assert history.times()["values"]["waiting"][-1] == [None, None], "which only the next step tells"
        seen(history, lambda: history.overview().step == BEFORE - 1)
        (pid,) = (each["pid"] for each in ask_status(find(str(run_dir)))["workers"] if each["worker_id"] == "w0")
        os.kill(pid, signal.SIGKILL)
        gates.open(BEFORE)
        gates.wait(AFTER)
        seen(history, lambda: history.span() == (0, AFTER - 1))
        gates.open(AFTER)
        assert command.wait() == 0, command.err
    history.refresh()
    assert history.notes == []
    told = history.times(points=STEPS)
    assert told["step"] == list(range(STEPS)), "also what the writer had not written when it was killed"
    at = told["workers"].index("w0")
    assert [leaves[at] is not None for leaves in told["values"]["leaves"]][:BEFORE] == [True] * BEFORE
    losses = [line["loss"] for line in read(run_dir) if line["kind"] == "step"]
    assert history.series(["loss"], points=STEPS)["loss"]["low"] == losses
    assert (history.overview().state, history.overview().step) == ("finished", STEPS - 1)
