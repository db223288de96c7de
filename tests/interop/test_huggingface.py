"""Hugging Face's Trainer has the same bits on any number of workers, and trains what it trains on one device."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

import unisono as library
from tests.interop import counting_training, main_metrics_training
from tests.interop.counting import NUMBERS, Lines, accuracy, arguments, collate, model, most_likely, sequences
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import Unisono, run_nursery
from tests.workers.gates import Gates
from tests.workers.losses import ended_workers
from unisono.interop.huggingface import UnisonoTrainer
from unisono.interop.huggingface.eval_batches import EvaluationBatches, batches_of
from unisono.interop.huggingface.trainer import _plain
from unisono.interop.huggingface.trainer_progress import Handout
from unisono.record.journal import compare
from unisono.record.journal.times import by_step
from unisono.testing import Faults, Outcome, run_workers

SCRIPT = Path(counting_training.__file__)
GATED = Path(__file__).resolve().parents[1] / "workers" / "gated.py"
STEPS = 15
"""Three epochs of five, the last of which has a smaller batch."""


@pytest.fixture(scope="module")
def nursery_with_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nursery that has imported the Trainer, which takes longer than all trainings here."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path, also=["unisono.interop.huggingface"]):
        yield path


@pytest.fixture
def quick(nursery_with_trainer: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this test do not import the Trainer each by itself."""
    monkeypatch.setenv("UNISONO_NURSERY", nursery_with_trainer)


def result(output: str) -> Any:
    """What the main worker has printed: logs, the best checkpoint, predictions."""
    (line,) = [line for line in output.splitlines() if "RESULT" in line]
    return json.loads(line.partition("RESULT ")[2])


def run(folder: Path, workers: int, *options: str, checkpoint: Path | None = None) -> Outcome:
    arguments = [str(folder / "output"), *([str(checkpoint)] if checkpoint else [])]
    outcome = run_workers(
        SCRIPT, workers, directory=folder / "run", arguments=arguments, options=[*PATIENT, *options], timeout_s=WAIT_S
    )
    assert outcome.exit_code == 0, outcome.output
    return outcome


@pytest.fixture(scope="module")
def alone(nursery_with_trainer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Where one worker has trained, and what came out."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_NURSERY", nursery_with_trainer)
        return folder, run(folder, 1)


def test_it_learns(alone: tuple[Path, Outcome]) -> None:
    logs, best, predictions = result(alone[1].output)
    assert best["best"] > 0.9
    assert len(predictions) == 5
    assert [line["step"] for line in logs if "eval_accuracy" in line] == [0, 4, 8, 12, 15]


def test_what_can_only_be_iterated_over_is_shared_and_so_is_the_evaluation_at_the_start(
    alone: tuple[Path, Outcome],
) -> None:
    """A line of the journal for each: of what each worker would compute by itself there is none."""
    assert [totals["samples"] for totals in alone[1].evaluations] == [21, 21, 21, 21, 21, 5]


@pytest.mark.usefixtures("quick")
def test_a_worker_that_joins_and_the_loss_of_the_one_that_writes_change_no_bit(
    alone: tuple[Path, Outcome], unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One joins in the second epoch; the main worker is lost in an evaluation, and the next one while it writes."""
    faults = Faults().kill("w0", step=7, at="in_evaluation").kill("w1", step=11, at="in_talk", skip=2)
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "run"
    with Gates(tmp_path / "gates", [5]) as gates:
        options = ["-n", 2, "--max-restarts", 0, "--run-dir", directory]
        command = unisono("run", *options, GATED, "--", SCRIPT, gates.folder, tmp_path / "output")
        gates.wait(5)
        assert unisono("scale", directory, 3).wait() == 0
        gates.open(5, command.generation("generation 2 with 3 workers"))
        assert command.wait() == 0, command.err
    assert ended_workers("\n".join(command.err)) == {"w0", "w1"}
    assert list(by_step(directory)[STEPS - 1]) == ["w2"]  # times of earlier steps may be lost with who writes them
    assert compare(alone[0] / "run", directory).startswith(f"identical: {STEPS} steps")
    assert result("\n".join(command.out)) == result(alone[1].output)


@pytest.mark.usefixtures("quick")
def test_it_goes_on_from_a_checkpoint_of_the_trainer_on_two_workers(
    alone: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folder, before = alone
    outcome = run(tmp_path, 2, checkpoint=folder / "output" / "checkpoint-8")
    assert outcome.digests[1:] == before.digests[9:]  # those of a run's first step have no names of sums in them
    assert outcome.final["model"] == before.final["model"]
    (logs, *others), (expected, *expected_others) = result(outcome.output), result(before.output)
    (evaluated,) = [line for line in expected if line["step"] == 8 and "eval_loss" in line]
    assert logs.count(evaluated) == 2  # as eval_on_start says, also here
    logs.remove(evaluated)
    assert (logs, others) == (expected, expected_others)


@pytest.mark.usefixtures("quick")
def test_it_goes_on_from_a_checkpoint_of_the_run_on_two_workers(alone: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, before = alone
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*11")
    outcome = run(tmp_path, 2, "--resume", str(checkpoint))
    assert outcome.final == before.final
    assert result(outcome.output) == result(before.output)


@pytest.mark.usefixtures("quick")
def test_metrics_and_logs_of_the_main_worker_are_those_of_all(tmp_path: Path) -> None:
    """A Trainer that computes and logs metrics on the main worker only, as that of run_qa.py does."""
    script = Path(main_metrics_training.__file__)
    found = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        outcome = run_workers(
            script, workers, directory=folder / "run", arguments=[str(folder)], options=PATIENT, timeout_s=WAIT_S
        )
        assert outcome.exit_code == 0, outcome.output
        found.append((result(outcome.output), outcome.final))
    (best, history), _ = found[0]
    assert best is not None
    assert len([line for line in history if "eval_f1" in line]) == 3
    assert found[1] == found[0]


# -- in this process -------------------------------------------------------------------------------------------------


class Next(nn.Module):
    """Predicts each number from the one before it, in float64; the loss is a mean over the labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(NUMBERS, NUMBERS, dtype=torch.float64)
        self.shift = nn.Parameter(torch.zeros(NUMBERS, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.table(input_ids) + self.shift
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


def trained(trainer: Trainer) -> list[Tensor]:
    trainer.train()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_it_trains_what_the_trainer_trains_on_one_device_up_to_rounding(tmp_path: Path) -> None:
    """Also the last batch of an epoch, of 9 sequences; in any number of micro-batches. Labels count, not sequences."""
    options = arguments(
        tmp_path, num_train_epochs=2, train_sampling_strategy="sequential", optim="sgd", max_grad_norm=0.5
    )
    given: dict[str, Any] = {"args": options, "train_dataset": sequences(57), "data_collator": collate}
    expected = trained(Trainer(model=Next(), **given))
    for microbatches in (None, 1, 4):
        with library.Run(seed=7) as run:
            found = trained(UnisonoTrainer(model=Next(), run=run, microbatches=microbatches, **given))
        # 10 updates at a rate of 0.02: rounding in float64 leaves 12 digits and more.
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_lengths_are_grouped_and_what_is_frozen_stays_in_bfloat16(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{**row, "length": len(row["input_ids"])} for row in sequences(57)])
    options = arguments(tmp_path, max_steps=12, train_sampling_strategy="group_by_length", bf16=True, use_cpu=True)
    with library.Run(seed=7) as run:
        small = model()
        small.transformer.wpe.requires_grad_(False)
        before = small.transformer.wpe.weight.detach().clone()
        trainer = UnisonoTrainer(model=small, args=options, run=run, train_dataset=rows, data_collator=collate)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(small.transformer.wpe.weight, before)


class _LargeBatches(Trainer):
    """Evaluates in batches of another size than that of the arguments."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        rows = self.eval_dataset[eval_dataset]
        return self.accelerator.prepare(DataLoader(rows, batch_size=5, collate_fn=collate))


class _UnisonoLargeBatches(UnisonoTrainer, _LargeBatches):
    pass


@pytest.mark.parametrize(("shared", "plain"), [(UnisonoTrainer, Trainer), (_UnisonoLargeBatches, _LargeBatches)])
def test_evaluation_before_and_without_a_training_is_that_of_the_trainer(
    shared: type[UnisonoTrainer], plain: type[Trainer], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "args": arguments(tmp_path),
        "eval_dataset": {"few": sequences(6), "more": sequences(21)},
        "data_collator": collate,
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": most_likely,
    }
    with library.Run(seed=7) as run:
        small = model()
        found = shared(model=small, run=run, **given).evaluate()
    expected = plain(model=small, **given).evaluate()
    names = {name for name in expected if name.endswith(("loss", "accuracy"))}
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_lengths_are_grouped_in_the_same_way_at_each_evaluation(tmp_path: Path) -> None:
    """Also in a worker that came after the first of them."""
    options = {"train_sampling_strategy": "group_by_length", "dataloader_persistent_workers": True}
    args = arguments(tmp_path, dataloader_num_workers=1, **options)
    with library.Run(seed=7) as run:
        trainer = UnisonoTrainer(model=Next(), args=args, run=run)
        first, second = (list(trainer.get_eval_dataloader(sequences(21)).batch_sampler) for _ in range(2))
    assert first == second


def test_the_others_wait_for_the_worker_that_writes_and_that_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with library.Run(seed=7) as run:
        trainer = UnisonoTrainer(model=Next(), args=arguments(tmp_path), run=run)
        monkeypatch.setattr(Trainer, "_save_checkpoint", lambda *_: run.barrier())
        with pytest.raises(library.UsageError, match="where other workers wait"):
            trainer._save_checkpoint(trainer.model, None)


def test_a_run_does_not_go_on_before_the_epoch_of_a_checkpoint_of_the_trainer() -> None:
    def handout() -> Handout:
        return Handout(iter([SimpleNamespace(number=7, number_in_loop=7)]), per_epoch=5, num_steps=15)

    assert [handout().begins_in(epoch) for epoch in (0, 1)] == [False, True]
    with pytest.raises(library.UsageError, match=r"step 7.*step 10 or later.*without resume_from_checkpoint"):
        handout().begins_in(2)


def test_a_batch_that_is_computed_again_is_the_same_where_samples_are_drawn() -> None:
    """Of a stream with random samples, in a random order; its collate function draws as well."""

    def noisy(rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64) + torch.rand(len(rows), dtype=torch.float64)

    stream = DataLoader(Lines(list(range(40)), share=0.7), batch_size=4, collate_fn=noisy)
    listed = DataLoader(list(range(30)), batch_size=4, collate_fn=noisy)  # type: ignore[arg-type]
    for loader in (stream, listed):
        with library.Run(seed=7) as run:
            batches = batches_of(loader, run)
            assert batches is not None
            count = -(-batches.num_samples // 4)

            def found(
                numbers: Sequence[int], batches: EvaluationBatches = batches, run: library.Run = run
            ) -> dict[int, Tensor]:
                seen: dict[int, Tensor] = {}

                def note(numbered: tuple[int, Any]) -> dict[str, int]:
                    seen[numbered[0]] = numbered[1]
                    return {"samples": len(numbered[1])}

                batches.evaluate(run, note, numbers)
                return seen

            whole, again = found(range(count)), found([1, count - 1])
        assert sum(map(len, whole.values())) == batches.num_samples
        assert len({int(value) for batch in whole.values() for value in batch}) == batches.num_samples
        assert list(whole) == list(range(count))
        assert {number: batch.tolist() for number, batch in again.items()} == {
            number: whole[number].tolist() for number in (1, count - 1)
        }


@pytest.mark.parametrize(("change", "words"), [(1, "gave more samples"), (-1, "gave 7 samples")])
def test_a_stream_that_has_other_samples_than_when_they_were_counted_is_refused(change: int, words: str) -> None:
    lines = Lines(list(range(8)))
    loader = DataLoader(lines, batch_size=4)
    with library.Run(seed=7) as run:
        batches = batches_of(loader, run)
        lines.rows = list(range(8 + change))
        assert batches is not None
        with pytest.raises(library.UsageError, match=f"{words}.*was 8.*a list"):
            batches.evaluate(run, lambda numbered: {"samples": 1}, [0, 1])


@dataclass
class _Unhashable(IterableDataset[int]):
    rows: list[int]
    held: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


class _Doubled(DataLoader[int]):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


def test_what_only_each_worker_can_read_is_not_shared_out() -> None:
    with library.Run(seed=7) as run:
        assert batches_of(DataLoader(_Unhashable([1, 2, 3])), run) is not None
        assert batches_of(DataLoader(_Unhashable([1, 2, 3], held=threading.Lock())), run) is None  # cannot be copied
        assert batches_of(_Doubled([1, 2, 3]), run) is None
    with pytest.raises(library.UsageError, match=r"a _Doubled, .*__iter__ is not overridden"):
        _plain(_Doubled([1, 2, 3]))


def test_workers_with_other_samples_do_not_evaluate_together() -> None:
    run: Any = SimpleNamespace(has_begun=True, seed=7, all_gather=lambda length: [length, length + 1])
    with pytest.raises(library.UsageError, match="3 samples on one worker, and 4 on another"):
        batches_of(DataLoader(_Unhashable([1, 2, 3])), run)


def test_a_loader_that_is_none_of_torch_is_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    rows = sequences(6)
    with library.Run(seed=7) as run:
        args = arguments(tmp_path)
        trainer = UnisonoTrainer(model=model(), args=args, run=run, train_dataset=rows, data_collator=collate)
        expected = trainer.evaluate(rows)["eval_loss"]
        batches = list(trainer.get_eval_dataloader(rows))
        trainer.get_eval_dataloader = lambda dataset: batches
        trainer.get_train_dataloader = lambda: batches
        assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=0.1)  # a mean over batches here
        with pytest.raises(library.UsageError, match=r"returned a list.*ConcatDataset"):
            trainer.train()


class _HandsOn(Trainer):
    """Takes one argument of its own, and adds a number of this worker to the logs, as trl's trainers do."""

    def __init__(self, own: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = own

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        super().log({**logs, "own": self.own}, *rest)


class _UnisonoHandsOn(UnisonoTrainer, _HandsOn):
    def log(self, logs: dict[str, float], *rest: Any) -> None:
        super().log({**logs, "twice": 2 * self.own}, *rest)


def test_a_subclass_may_hand_arguments_on_and_log_what_is_of_one_worker(tmp_path: Path) -> None:
    """What it logs is no part of the state in which workers are compared."""
    args = arguments(tmp_path, max_steps=4, logging_steps=1, save_strategy="no")
    with library.Run(tmp_path / "run", seed=7) as run:
        trainer = _UnisonoHandsOn(0.5, model(), args, collate, train_dataset=sequences(24), run=run)
        trainer.train()
        state = trainer._progress.state_dict()
    assert [(line.get("own"), line.get("twice")) for line in trainer.state.log_history] == [(0.5, 1.0)] * 5
    assert ["loss" in line for line in state["log_history"]] == [True] * 4 + [False]
    assert not any({"own", "twice"} & set(line) for line in state["log_history"])
    assert compare(tmp_path / "run", tmp_path / "run").startswith("identical: 4 steps")


def test_model_init_is_for_one_training(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, save_strategy="no")
    with library.Run(seed=7) as run:
        trainer = UnisonoTrainer(
            model_init=lambda: model(), args=args, run=run, train_dataset=sequences(12), data_collator=collate
        )
        trainer.train()
        with pytest.raises(library.UsageError, match="model_init makes a new model"):
            trainer.train()


class _StopsEpoch(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


class _Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def test_a_callback_may_stop_the_training_and_not_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's cache is emptied in the steps that the arguments say, in each micro-batch."""
    emptied: list[None] = []
    monkeypatch.setattr("unisono.interop.huggingface.trainer.clear_device_cache", lambda: emptied.append(None))
    given: dict[str, Any] = {
        "args": arguments(tmp_path, save_strategy="no", torch_empty_cache_steps=2),
        "train_dataset": sequences(57),
        "data_collator": collate,
    }
    with library.Run(tmp_path / "run", seed=7) as run:
        UnisonoTrainer(model=model(), run=run, callbacks=[_Stops()], **given).train()
    assert compare(tmp_path / "run", tmp_path / "run").startswith("identical: 3 steps")
    assert len(emptied) == 2 * 6
    with library.Run(seed=7) as run, pytest.raises(library.UsageError, match="should_training_stop"):
        UnisonoTrainer(model=model(), run=run, callbacks=[_StopsEpoch()], **given).train()


REFUSED = {
    "auto_find_batch_size": (True, "choose the batch size"),
    "train_sampling_strategy": ("batch_rebalance", "group_by_length"),
    "ignore_data_skip": (True, "computes the samples that are left"),
    "save_on_each_node": (True, "one worker writes"),
    "bf16_full_eval": (True, "cast the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_has_no_meaning_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    value, words = REFUSED[name]
    with library.Run() as run, pytest.raises(library.UsageError, match=f"{name}=.*{words}"):
        UnisonoTrainer(model=Next(), args=arguments(tmp_path, use_cpu=True, **{name: value}), run=run)


def test_a_dataset_that_can_be_read_once_is_refused(tmp_path: Path) -> None:
    with library.Run() as run, pytest.raises(library.UsageError, match="a list of the samples"):
        UnisonoTrainer(model=Next(), args=arguments(tmp_path), run=run, train_dataset=iter(sequences(4)))


def test_of_a_loader_of_its_own_the_processes_begin_and_wait_as_it_says(tmp_path: Path) -> None:
    rows, options = sequences(57), {"num_workers": 1, "timeout": 9, "worker_init_fn": print}
    with library.Run() as run:
        args = arguments(tmp_path, dataloader_num_workers=1)
        trainer = UnisonoTrainer(model=Next(), args=args, run=run, train_dataset=rows)
        own = trainer.accelerator.prepare(DataLoader(rows, batch_size=12, **options))
        found = [_plain(loader) for loader in (own, trainer.get_train_dataloader())]
    assert [(loader.timeout, loader.worker_init_fn) for loader in found] == [(9, print), (0, None)]


def test_a_stream_is_read_in_as_many_parts_as_micro_batches(tmp_path: Path) -> None:
    """It ends in the fourth step, and begins again."""
    read: set[int] = set()

    def noted(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        read.update(row["index"] for row in rows)
        return collate(rows)

    rows = [{**row, "index": index} for index, row in enumerate(sequences(42))]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=6)
    args = arguments(tmp_path, max_steps=6, remove_unused_columns=False)
    with library.Run(tmp_path / "run", seed=7) as run:
        trainer = UnisonoTrainer(model=model(), args=args, run=run, train_dataset=stream, data_collator=noted)
        trainer.train()
        assert read == set(range(42))
        assert trainer.evaluate(stream)["eval_loss"] == pytest.approx(trainer.evaluate(rows)["eval_loss"])
    assert compare(tmp_path / "run", tmp_path / "run").startswith("identical: 6 steps")
