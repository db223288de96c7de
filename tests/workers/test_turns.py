"""Workers of a benchmark take turns with those of another side: all must end their turn at the same place."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import sides, step_time
from tests.house.rooms import ROOT
from tests.waiting import PATIENT, WAIT_S

pytestmark = pytest.mark.more

SCRIPT = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.strategy_sides import SIDES, SIZES, Task

class Counting:
    rank, number = -1, 0

    def hello(self, rank):
        self.rank = rank

    def go_on(self, steps=1):
        self.number += 1
        return True

watch = Counting()
task = Task(
    case=SIZES[4], microbatches=2, workers=2, inner_steps=2, stall_s=0.0, balance=False, num_steps=4,
    result="loss.json", rank=0, meeting="",
)
SIDES["unisono local"](task, watch)
pathlib.Path(f"asked-{watch.rank}").write_text(str(watch.number))
"""


def test_workers_of_local_steps_ask_for_their_turn_equally_often(nursery: None, tmp_path: Path) -> None:
    """Also in the second round, where one of the two has one step less: it is left out of a rehearsal."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "unisono", "run", "train.py", "--workers", "2", *PATIENT, "--", str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_a_turn_ends_after_a_whole_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = multiprocessing.Pipe()
    with own, other:
        monkeypatch.setattr(sides, "Client", lambda *_, **__: other)
        control = sides.Control("")
        for turn in (3, 2, 0):
            own.send(turn)
        assert [control.go_on(2) for _ in range(4)] == [True, True, True, False]
        assert [len(own.recv()["times"]) for _ in range(2)] == [4, 2]


def test_a_peer_that_fails_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are compared without it; one that is not installed is not tried."""
    monkeypatch.setattr(step_time, "missing", lambda side: "not installed" if side == "torchft" else "")
    tried = []

    def measured(names: list[str]) -> dict[str, object]:
        tried.append([*names])
        if "fsdp2" in names:
            raise step_time.SideFailed("fsdp2", "process 7 ended with exit code 1")
        return {"names": names}

    result, left_out = step_time.compare_those_that_can(["unisono", "ddp", "fsdp2", "torchft"], measured)
    assert tried == [["unisono", "ddp", "fsdp2"], ["unisono", "ddp"]]
    assert result == {"names": ["unisono", "ddp"]}
    assert left_out == {"torchft": "not installed", "fsdp2": "fsdp2: process 7 ended with exit code 1"}


@pytest.mark.parametrize("side", ["unisono", "ddp"])
def test_without_the_sides_that_are_compared_with_there_is_no_result(side: str) -> None:
    def measured(names: list[str]) -> dict[str, object]:
        raise step_time.SideFailed(side, "no answer")

    with pytest.raises(step_time.SideFailed):
        step_time.compare_those_that_can(["unisono", "ddp"], measured)
