"""A Trainer of Lightning on any number of workers, and not one bit changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection, RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from tests.interop.lightning_training import STEPS, Digits
from tests.workers.conftest import Unisono, mark, run_nursery, unisono
from tests.workers.gates import Gates
from unisono.core.errors import UsageError
from unisono.interop.lightning.logs import BatchPlace, LogEntry, LogSums, Results, extreme
from unisono.interop.lightning.metrics import metrics_of
from unisono.interop.lightning.refused_options import check
from unisono.interop.lightning.trainer_data import (
    EvaluationLoader,
    GlobalBatch,
    checked,
    in_global_batches,
    in_one_order,
    steps_of,
    stretches,
)
from unisono.record.journal import compare, times
from unisono.testing import Faults, Outcome, run_workers

__all__ = ["mark", "unisono"]


SCRIPT = Path(__file__).with_name("lightning_training.py")
DEMOS = SCRIPT.with_name("lightning_demos.py")
CLI = SCRIPT.with_name("lightning_cli_training.py")
LOGS = Path("log/version_0/metrics.csv")


@pytest.fixture(scope="session")
def lightning_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Has imported Lightning, so that no worker does."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path, also=("lightning.pytorch", "torchmetrics.classification")):
        yield path


@pytest.fixture
def nursery(lightning_nursery: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_NURSERY", lightning_nursery)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, lightning_nursery: str) -> tuple[Path, Outcome]:
    """The folder of a training of one worker, all the time."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("UNISONO_NURSERY", lightning_nursery)
        return folder, run(folder, 1)


def run(folder: Path, workers: int, *arguments: str, options: tuple[str, ...] = (), script: Path = SCRIPT) -> Outcome:
    given = ["--root", str(folder), *arguments]
    outcome = run_workers(script, workers, directory=folder / "run", arguments=given, options=options)
    assert outcome.exit_code == 0, outcome.output
    return outcome


def results_of(outcome: Outcome) -> list[Any]:
    """Return the digests, losses and logged values of all steps, and the totals of all evaluations."""
    steps = [
        [line.get(name) for name in ("digest", "loss", "logs")] for line in outcome.lines if line["kind"] == "step"
    ]
    return [steps, outcome.evaluations]


@pytest.mark.usefixtures("nursery")
def test_it_is_the_training_of_a_plain_loop(alone: tuple[Path, Outcome], tmp_path: Path) -> None:
    plain = run(tmp_path, 1, "--plain").final
    assert set(plain) == {"model", "optimizer", "scheduler"}
    assert {name: alone[1].final[name] for name in plain} == plain


@pytest.mark.usefixtures("nursery")
def test_workers_that_are_lost_and_replaced_change_no_bit_and_no_logged_value(
    alone: tuple[Path, Outcome], tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults().kill("w1", step=4, at="after_backward").kill("w2", step=8, at="in_evaluation")
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", [12]) as gates:
        options = ("-n", 3, "--run-dir", tmp_path / "run")
        command = unisono("run", SCRIPT, *options, "--", "--root", tmp_path, "--gates", gates.folder)
        gates.open(12, command.generation("w3 joins"))
        assert command.wait() == 0, command.err
    assert compare(alone[0] / "run", tmp_path / "run").startswith(f"identical: {STEPS} steps")
    assert "w3" in times.by_step(tmp_path / "run")[STEPS - 1]
    assert (tmp_path / LOGS).read_text() == (alone[0] / LOGS).read_text()


@pytest.mark.usefixtures("nursery")
def test_a_run_that_was_killed_goes_on_within_the_epoch(
    alone: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name, value in Faults().kill_run("w0", step=10, at="after_backward").environment().items():
            patch.setenv(name, value)
        killed = run_workers(SCRIPT, 1, directory=tmp_path / "run", arguments=["--root", str(tmp_path)])
    assert len(killed.digests) == 10
    run(tmp_path, 2, options=("--resume", "auto"))
    assert compare(alone[0] / "run", tmp_path / "run").startswith(f"identical: {STEPS} steps")


@pytest.mark.usefixtures("nursery")
def test_batches_that_are_accumulated_are_one_global_batch(
    alone: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--root", str(tmp_path), "--accumulate", "2"]
    with monkeypatch.context() as patch:
        for name, value in Faults().kill_run("w0", step=10, at="after_backward").environment().items():
            patch.setenv(name, value)
        killed = run_workers(SCRIPT, 1, directory=tmp_path / "run", arguments=arguments)
    assert len(killed.digests) == 10
    again = run(tmp_path, 2, *arguments[2:], options=("--resume", "auto"))
    # The state of the Trainer has other numbers of batches.
    assert {**again.final, "trainer": ""} == {**alone[1].final, "trainer": ""}
    assert results_of(again) == results_of(alone[1])


@pytest.mark.usefixtures("nursery")
def test_the_command_line_of_lightning_names_the_strategy_or_the_script_does(tmp_path: Path) -> None:
    outcomes = []
    for where, workers in (("command-line", 1), ("command-line", 2), ("script", 2)):
        root = tmp_path / f"{where}{workers}"
        arguments = [where, "fit", "--trainer.max_epochs", "2", "--trainer.default_root_dir", str(root)]
        arguments += ["--trainer.enable_progress_bar", "false", "--data.batch_size", "20"]
        if where == "command-line":
            arguments += ["--trainer.strategy", "unisono.interop.lightning.UnisonoStrategy"]
            arguments += ["--trainer.strategy.microbatches", "4"]
        outcomes.append(run_workers(CLI, workers, directory=root / "run", arguments=arguments))
        assert outcomes[-1].exit_code == 0, outcomes[-1].output
        (kept,) = root.glob("lightning_logs/version_*/config.yaml")
        assert "class_path: unisono.interop.lightning.UnisonoStrategy" in kept.read_text()
    assert len(outcomes[0].digests) == 6
    for outcome in outcomes[1:]:
        assert outcome.final == outcomes[0].final
        assert results_of(outcome) == results_of(outcomes[0])


@pytest.mark.usefixtures("nursery")
def test_demos_of_lightning_are_trained_as_they_are(tmp_path: Path) -> None:
    one, two = (run(tmp_path / str(workers), workers, script=DEMOS) for workers in (1, 2))
    assert {"model", "model2", "model3"} < set(one.final)
    assert two.final == one.final
    assert results_of(two) == results_of(one)


# -- without a process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "max_epochs", "max_steps", "found"),
    [
        ((0, 0, 0), 3, -1, [(3, 15)]),
        ((0, 0, 0), -1, 7, [(2, 7)]),
        ((0, 0, 0), 2, 100, [(2, 10)]),
        ((7, 1, 2), 3, -1, [(1, 3), (1, 5)]),
        ((5, 1, 0), 3, -1, [(2, 10)]),
        ((7, 1, 2), 3, 8, [(1, 1)]),
        ((15, 3, 0), 3, -1, []),
        ((6, 2, 0), 4, -1, [(2, 10)]),  # an earlier fit had 3 steps in an epoch
        ((6, 2, 0), -1, 13, [(2, 7)]),
    ],
)
def test_a_training_is_cut_where_the_epochs_of_the_trainer_begin(
    done: tuple[int, int, int], max_epochs: int, max_steps: int, found: list[tuple[int, int]]
) -> None:
    steps, epochs, in_epoch = done
    limits = {"per_epoch": 5, "max_epochs": max_epochs, "max_steps": max_steps}
    assert stretches(steps=steps, epochs=epochs, done=in_epoch, **limits) == found


def test_a_training_that_would_go_on_within_a_step_is_refused() -> None:
    assert [steps_of(batches, 7, 3) for batches in (0, 3, 6, 7)] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="after batch 4 of an epoch, in the middle of a step of 3 batches"):
        steps_of(4, 7, 3)


@pytest.mark.parametrize(
    ("options", "batches", "accumulates", "found"),
    [
        ({}, 6, 4, [16, 6]),
        ({"drop_last": True}, 5, 4, [16, 4]),  # five whole batches
        ({"drop_last": True}, 5, 1, [4, 4, 4, 4, 4]),
        ({}, 3, 2, [8, 4]),  # limit_train_batches=3
        ({}, 3, 1, [4, 4, 4]),
    ],
)
def test_a_step_has_the_samples_of_its_batches(
    options: dict[str, Any], batches: int, accumulates: int, found: list[int]
) -> None:
    loader: DataLoader[Any] = DataLoader(range(22), batch_size=4, **options)  # type: ignore[arg-type]
    steps = [batch.tolist() for batch in in_global_batches(loader, batches=batches, accumulates=accumulates)]
    assert [len(step) for step in steps] == found
    given = [batch.tolist() for batch in itertools.islice(loader, batches)]
    assert list(itertools.chain(*steps)) == list(itertools.chain(*given))


class _Doubled(DataLoader[int]):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


def test_a_loader_that_makes_its_batches_in_a_way_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the training is a _Doubled.*collate_fn"):
        checked(_Doubled([1, 2, 3]), "the training")


def test_what_a_hook_logs_is_weighed_by_the_batch_of_the_loader() -> None:
    results = Results(training=True)
    weights = []
    for num_samples, batches in ((24, 2), (6, 1)):
        step: Any = SimpleNamespace(num_samples=num_samples)
        results.batch = batch = GlobalBatch(step, 12)
        for batch.index in range(batches):
            weights.append(
                results._extract_batch_size(1.0, None, SimpleNamespace(on_epoch=True, is_mean_reduction=True))
            )
    assert weights == [12, 12, 6]


def test_the_loader_of_an_evaluation_can_be_looked_at_outside_of_it() -> None:
    loader: DataLoader[Any] = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    outside = EvaluationLoader(loader, lambda _: None)
    assert outside.dataset is loader.dataset
    assert [batch.tolist() for batch in outside] == [[0, 1], [2, 3]]
    [whole] = EvaluationLoader(loader, lambda _: (0, 1.0))
    assert whole.num_samples == 2
    with pytest.raises(UsageError, match="iterate over the DataLoader that you gave"):
        next(iter(whole))


def test_an_evaluation_in_an_order_of_its_own_is_refused() -> None:
    assert in_one_order(loader := DataLoader(range(4), shuffle=True)) is loader  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="RandomSampler"):
        in_one_order(DataLoader(range(4), shuffle=True, generator=torch.Generator()))  # type: ignore[arg-type]


def test_the_name_of_a_sum_says_how_it_is_logged() -> None:
    for entry in (
        LogEntry("train_loss", "training_step", "mean", ("bar", "step", "epoch")),
        LogEntry("a [b] c", "test_step", "metric", (), "net.accuracy"),
    ):
        assert LogEntry.parse(entry.key) == entry
    assert LogEntry.parse("right") is None
    assert LogEntry.parse("net.accuracy.tp [torchmetrics]") is None


def test_a_reduction_that_is_not_known_is_refused() -> None:
    results = Results(training=True)
    results.taking = LogSums(BatchPlace(0, 1, 4))
    results.log("training_step", "x", torch.ones(()), reduce_fx=torch.max)
    assert list(results.taking.sums) == ["x [training_step max logger epoch suffix]"]
    with pytest.raises(UsageError, match="'y', reduce_fx="):
        results.log("training_step", "y", torch.ones(()), reduce_fx=lambda values: values.mean())


def test_a_worker_without_a_value_does_not_change_an_extreme() -> None:
    totals = torch.zeros(2, 3, dtype=torch.float64)
    for number, value in ((0, -3.0), (2, -5.0)):
        taken = LogSums(BatchPlace(number, 3, 1))
        taken.spread("x", "max", torch.tensor(value - 1.0, dtype=torch.float64))
        taken.spread("x", "max", torch.tensor(value, dtype=torch.float64))
        totals += taken.sums["x"]
    assert extreme("max", totals) == -3.0
    assert extreme("min", totals) == -5.0


def test_metrics_that_keep_more_than_their_states_are_refused() -> None:
    module = torch.nn.Module()
    module.smooth = RunningMean(3)
    with pytest.raises(UsageError, match="'smooth' is a RunningMean"):
        metrics_of(module)


def test_a_collection_that_was_used_before_has_its_groups_again() -> None:
    given = (torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    module = torch.nn.Module()
    module.both = both = MetricCollection([MulticlassAccuracy(2), MulticlassPrecision(2)])
    both.update(*given)
    before, groups = both.compute(), both.compute_groups
    metrics = metrics_of(module)
    assert both.compute_groups == {}
    metrics.begin()
    metrics.empty()
    taken = LogSums(BatchPlace(0, 1, 3))
    both.update(*given)
    metrics.take(taken, keeps_rows=False)
    metrics.finish(taken.sums, {}, [])
    assert both["MulticlassPrecision"]._update_count == 2
    metrics.release()
    assert both.compute_groups == groups
    assert both.compute() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"callbacks": pl.callbacks.GradientAccumulationScheduler({2: 4})}, "a global batch of one size"),
        ({"max_time": "00:01:00:00"}, "max_steps="),
        ({"val_check_interval": "00:00:01:00"}, "60 seconds"),
        ({"reload_dataloaders_every_n_epochs": 1}, "call trainer.fit once"),
        (
            {"callbacks": pl.callbacks.OnExceptionCheckpoint("x"), "enable_checkpointing": True},
            "an error on one worker",
        ),
        ({"devices": 2}, "unisono run --workers N"),
        ({"callbacks": pl.callbacks.StochasticWeightAveraging(0.1)}, "AveragedModel"),
        ({}, "automatic_optimization=False"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    trainer = pl.Trainer(**{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, **arguments})
    trainer.state.fn = TrainerFn.FITTING
    module = Digits()
    module.automatic_optimization = bool(arguments)
    with pytest.raises(UsageError, match=words):
        check(trainer, module)
