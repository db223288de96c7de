"""MLflow has every step of a run once, whoever was killed, and after a run was resumed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.pure.test_journal import end, evaluation, step
from tests.waiting import wait_until
from tests.watch.next_writer import STEPS, run_with_a_killed_writer
from tests.workers.conftest import Unisono
from unisono.core.events import RunStarted
from unisono.record.journal import JOURNAL, Journal, read, truncate
from unisono.record.journal.lines import LineEvent
from unisono.views.watch.mlflow import MLflow, _Client


@pytest.fixture(autouse=True)
def own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


class Kept:
    """What MLflow has of a run directory."""

    def __init__(self, run_dir: Path, experiment: str = "unisono") -> None:
        from mlflow import MlflowClient  # takes seconds, which every process that collects tests would need

        self.client = MlflowClient(tracking_uri=(run_dir / "mlruns").as_uri())
        found = self.client.get_experiment_by_name(experiment)
        self.runs: list[Any] = list(self.client.search_runs([found.experiment_id], order_by=["start_time ASC"]))

    def history(self, name: str, run: int = 0) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.runs[run].info.run_id, name)
        return [(each.step, each.value) for each in history]


def num_logged(run_dir: Path) -> int:
    """How many steps are in MLflow's files by now."""
    return sum(len(path.read_text().splitlines()) for path in (run_dir / "mlruns").glob("*/*/metrics/loss"))


class Writer:
    """A writer of a run: its journal, and what speaks with MLflow, in this process."""

    def __init__(self, run_dir: Path, first: int, *, lines: int = 0, seed: int = 3) -> None:
        self.journal = Journal(run_dir / JOURNAL)
        self.journal.go_on_at(lines)
        self.journal.start(writer=True)
        self.client = _Client("", "")
        self.client.emit_all(
            [RunStarted(run_id="r1", directory=str(run_dir), step=first, recipe={"seed": seed, "steps": 10 + first})]
        )

    def emit(self, *events: LineEvent, is_lost: bool = False) -> None:
        numbered = [self.journal.emit(event) for event in events]
        if not is_lost:
            self.client.emit_all(numbered)


def test_the_next_writer_takes_what_the_lost_one_had_not_logged(run_dir: Path) -> None:
    first = Writer(run_dir, 0)
    first.emit(*(step(number, time=1e9 + number) for number in range(5)))
    first.emit(*(step(number) for number in range(5, 8)), evaluation(8, right=3), is_lost=True)
    second = Writer(run_dir, 7, lines=9)
    second.client.emit_all([step(7)])  # told again
    second.emit(step(8), evaluation(9, right=4), end())
    second.client.close()
    kept = Kept(run_dir)
    (run,) = kept.runs
    assert [number for number, _ in kept.history("loss")] == list(range(9))
    assert [number for number, _ in kept.history("seconds/compute")] == list(range(9))
    assert kept.history("evaluation/right") == [(8, 3.0), (9, 4.0)]
    assert run.data.params == {"seed": "3", "steps": "10"}
    assert run.info.status == "FINISHED"


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(run_dir: Path) -> None:
    first = Writer(run_dir, 0)
    first.emit(*map(step, range(8)), end(ok=False))
    assert Kept(run_dir).runs[0].info.status == "FAILED"
    truncate(run_dir / JOURNAL, 4)
    second = Writer(run_dir, 4, lines=4)
    second.emit(*map(step, range(4, 10)), end())
    kept = Kept(run_dir)
    assert len(kept.runs) == 1
    assert [number for number, _ in kept.history("loss")] == list(range(10))
    assert kept.runs[0].info.status == "FINISHED"


def test_another_recipe_is_another_run_of_mlflow(run_dir: Path) -> None:
    """It has other bits, and those of the first cannot be taken back."""
    first = Writer(run_dir, 0)
    first.emit(*map(step, range(8)))
    truncate(run_dir / JOURNAL, 4)
    second = Writer(run_dir, 4, lines=4, seed=5)
    second.emit(*(step(number, loss=2.0) for number in range(4, 6)))
    kept = Kept(run_dir)
    assert [number for number, _ in kept.history("loss", 1)] == list(range(6))
    assert [value for _, value in kept.history("loss", 1)][4:] == [2.0, 2.0]


def test_the_worker_that_logs_draws_the_same_random_numbers(run_dir: Path) -> None:
    """MLflow draws the names of its runs from Python's global generator."""
    random.seed(1)
    before = random.getstate()
    sink = MLflow()
    sink.emit(RunStarted(run_id="r1", directory=str(run_dir), step=0, recipe={}))
    sink.emit(step(0))
    wait_until(lambda: num_logged(run_dir) == 1, "its process logs")  # its end is not waited for as long
    sink.close()
    assert random.getstate() == before
    assert Kept(run_dir).history("loss") == [(0, 0.5)]


def test_a_server_that_is_not_there_is_said_once(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink = MLflow(tracking_uri="nonsense://nowhere")
    sink.emit(RunStarted(run_id="r1", directory=str(run_dir), step=0, recipe={}))
    said = ""

    def is_said() -> bool:
        nonlocal said
        sink.emit(step(0))  # the next one finds that its process has ended
        said += capfd.readouterr().err
        return "gets no more events" in said

    wait_until(is_said, "it is said")
    sink.close()
    said += capfd.readouterr().err
    assert said.count("the sink MLflow gets no more events") == 1
    assert "nonsense" in said


@pytest.mark.usefixtures("nursery")
def test_the_example_logs_every_step_although_the_writer_is_killed(
    unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_with_a_killed_writer("log_to_mlflow.py", unisono, tmp_path, lambda: num_logged(run_dir), monkeypatch)
    kept = Kept(run_dir, "blobs")
    assert [number for number, _ in kept.history("loss")] == list(range(STEPS))
    assert [value for _, value in kept.history("loss")] == [
        line["loss"] for line in read(run_dir) if line["kind"] == "step"
    ]
    assert len(kept.runs) == 1
    assert kept.runs[0].info.status == "FINISHED"
