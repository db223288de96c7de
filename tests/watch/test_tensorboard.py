"""TensorBoard's own reader finds every step of a run once, whoever was killed, and after a run was resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from tests.pure.test_journal import end, evaluation, step
from tests.waiting import WAIT_S
from unisono.core.events import RunStarted
from unisono.record.journal import JOURNAL, Journal, events, truncate
from unisono.record.journal.lines import LineEvent
from unisono.testing import Faults, run_workers
from unisono.views.watch.charts import scalars
from unisono.views.watch.tensorboard import TensorBoard

WORKERS = Path(__file__).parents[1] / "workers"


def shown(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a directory: (step, value) by tag."""
    reader = EventAccumulator(str(directory), {"scalars": 0})
    reader.Reload()
    return {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def expected(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from the journal. A value has 32 bits in an event file."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(run_dir):
        if event.__class__.__name__ in ("StepFinished", "EvaluationFinished"):
            for tag, value in scalars(event).items():  # type: ignore[arg-type]
                found.setdefault(tag, []).append((event.step, pytest.approx(value, rel=1e-6, nan_ok=True)))  # type: ignore[union-attr]
    return found


def check_shown(run_dir: Path, num_steps: int) -> None:
    right, found = expected(run_dir), shown(run_dir / "tensorboard")
    assert [number for number, _ in found["loss"]] == list(range(num_steps))
    found.pop("workers", None)  # no part of a line of the journal
    right.pop("workers", None)
    assert found == right


class Writer:
    """A writer of a run: its journal, and its sink."""

    def __init__(self, run_dir: Path, first: int, *, lines: int = 0) -> None:
        self.journal = Journal(run_dir / JOURNAL)
        self.journal.go_on_at(lines)
        self.journal.start(writer=True)
        self.sink = TensorBoard()
        recipe: dict[str, int | bool | str] = {"seed": 3, "order": "x", "b": True}
        self.sink.emit(RunStarted(run_id="r1", directory=str(run_dir), step=first, recipe=recipe))

    def emit(self, event: LineEvent, *, is_lost: bool = False) -> None:
        """An event; with ``is_lost`` the writer dies before its sink has written it."""
        event = self.journal.emit(event)
        if not is_lost:
            self.sink.emit(event)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_the_next_writer_takes_what_the_lost_one_had_not_written(run_dir: Path) -> None:
    first = Writer(run_dir, 0)
    for number in range(8):
        first.emit(step(number, time=1e9 + number), is_lost=number >= 5)
    first.sink.close()
    second = Writer(run_dir, 7, lines=8)
    for event in (step(7), evaluation(8, right=3), step(8), end()):  # its last event is told again
        second.emit(event) if event != step(7) else second.sink.emit(event)
    second.sink.close()
    check_shown(run_dir, 9)
    assert shown(run_dir / "tensorboard")["evaluation/right"] == [(8, 3.0)]


def test_a_run_that_is_resumed_replaces_what_it_does_again(run_dir: Path) -> None:
    """It was killed after step 7, and goes on from the checkpoint before step 4."""
    first = Writer(run_dir, 0)
    for number in range(8):
        first.emit(step(number, loss=1.0))
        if number == 3:
            first.emit(evaluation(4, right=1))
    first.sink.close()
    truncate(run_dir / JOURNAL, 5)
    second = Writer(run_dir, 4, lines=5)
    for number in range(4, 10):
        second.emit(step(number, loss=2.0))
    second.emit(end())
    second.sink.close()
    check_shown(run_dir, 10)
    assert [value for _, value in shown(run_dir / "tensorboard")["loss"]] == [1.0] * 4 + [2.0] * 6


def test_a_run_that_shows_itself_late_is_shown_from_its_beginning(run_dir: Path) -> None:
    before = Journal(run_dir / JOURNAL)
    before.start(writer=True)
    for number in range(600):  # several blocks of lines
        before.emit(step(number))
    late = Writer(run_dir, 600, lines=600)
    late.emit(step(600))
    late.sink.close()
    check_shown(run_dir, 601)


def test_the_times_are_those_of_the_events_and_the_recipe_is_the_hyperparameters(run_dir: Path) -> None:
    writer = Writer(run_dir, 0)
    for number in range(3):
        writer.emit(step(number, time=1e9 + number, logs={"lr": 0.1, "odd": float("nan")}))
    writer.emit(end(time=2e9))
    writer.sink.close()
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    assert [each.wall_time for each in reader.Scalars("log/lr")] == [1e9, 1e9 + 1, 1e9 + 2]
    content = reader.PluginTagToContent("hparams")
    begun = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert begun.hparams["seed"].number_value == 3.0
    assert begun.hparams["order"].string_value == "x"
    assert begun.hparams["b"].bool_value is True
    ended = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert ended.end_time_secs == 2e9


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("worker", ["w0", "w1"])
def test_whoever_is_killed_every_step_is_shown_once(worker: str, tmp_path: Path) -> None:
    """With kill -9, just after the step: what waits in the memory of that worker is lost with it."""
    faults = Faults().kill(worker, at="after_step", step=5)
    outcome = run_workers(
        WORKERS / "small_training.py", 2, directory=tmp_path / "run", arguments=["--steps", "12"],
        options=["--sink", "tensorboard"], faults=faults, timeout_s=WAIT_S,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert f"worker {worker}" in outcome.output
    check_shown(tmp_path / "run", 12)


@pytest.mark.usefixtures("nursery")
def test_a_resumed_run_goes_on_in_the_same_directory(tmp_path: Path) -> None:
    """Its first part has gone on after the checkpoint, and ends without another one."""
    script, run_dir = WORKERS / "checkpointed_training.py", tmp_path / "run"
    dies = run_workers(
        script, 1, directory=run_dir, options=["--sink", "tensorboard", "--max-restarts", "0"],
        arguments=["--steps", "10"], faults=Faults().kill("w0", at="after_step", step=8), timeout_s=WAIT_S,
    )  # fmt: skip
    assert dies.exit_code != 0
    goes_on = run_workers(
        script, 1, directory=run_dir, options=["--sink", "tensorboard", "--resume", "auto"],
        arguments=["--steps", "10"], timeout_s=WAIT_S,
    )  # fmt: skip
    assert goes_on.exit_code == 0, goes_on.output
    check_shown(run_dir, 10)
