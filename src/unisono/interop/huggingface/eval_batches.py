"""Evaluation shared by the workers, within the Trainer's own evaluation loop.

The Trainer's loop goes over a loader and calls ``prediction_step`` for each batch; then it computes the metrics. Here
the loader has only the sizes of the batches. At the first call of ``prediction_step`` the workers compute all batches
together, each of them once (`unisono.Run.evaluate`), and give each other what has come out (`unisono.Run.all_gather`).
So the loop has on all workers what it would have on one, in the same order.

Batches are numbered in the order of the dataset, whichever worker computes them. Random numbers are those of a batch's
number and of a sample's place, so a batch that is computed again, because its worker was lost, is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, Protocol

import torch
from accelerate.data_loader import DataLoaderAdapter
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import has_length

from unisono.core.errors import RecipeError, UsageError
from unisono.engine.microbatch.iterables import stream_source_of
from unisono.engine.microbatch.loaders import has_own_iter
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.microbatch.streams import Streams
from unisono.script.run import Run

__all__ = ["EvaluationBatches", "batches_of", "is_of_its_own", "shared"]

Function = Callable[[tuple[int, Any]], Mapping[str, Any]]
"""(number of a batch, the batch) -> its totals by name."""


class EvaluationBatches(Protocol):
    """The batches of one evaluation."""

    batch_size: int
    num_samples: int

    def evaluate(self, run: Run, function: Function, numbers: Sequence[int]) -> None:
        """Call a function for the batches with these numbers, each on one worker. Collective."""


def is_of_its_own(loader: Any) -> bool:
    """Return whether a loader makes its batches in a way that only it knows: none of torch, or with an own __iter__.

    Accelerate wraps loaders; of one of a class of its own it keeps no more than the dataset and the options, too.
    """
    if issubclass(type(loader), DataLoaderAdapter):
        return False
    return not isinstance(loader, DataLoader) or has_own_iter(loader)


def batches_of(loader: Any, run: Run) -> EvaluationBatches | None:
    """Return the batches of a loader; None: each worker has to evaluate all of them. Collective.

    Raises:
        UsageError: workers have other numbers of samples.
    """
    if is_of_its_own(loader):
        return None
    if isinstance(loader.dataset, IterableDataset):
        divides = loader.num_workers and loader.worker_init_fn is not None
        if loader.batch_size is None or divides:
            return None
        length = _agreed_length(loader.dataset, run)
        return None if length is None else _Read(loader, length, run.seed)
    return _Picked(loader, run) if type(loader.batch_sampler) is BatchSampler else None


class _Picked:
    """Batches of a dataset with ``[i]``."""

    def __init__(self, loader: DataLoader[Any], run: Run) -> None:
        cuts: Any = loader.batch_sampler
        batches = [list(batch) for batch in cuts]
        if run.has_begun and not isinstance(cuts.sampler, SequentialSampler):
            batches = run.broadcast(batches)  # a sampler may draw from a generator of this worker
        self.batch_size: int = cuts.batch_size
        self.num_samples = sum(map(len, batches))
        self._batches = batches
        self._loader = loader

    def evaluate(self, run: Run, function: Function, numbers: Sequence[int]) -> None:
        some = _Some(self._loader, self._batches, numbers, run.seed)
        run.evaluate(some, function, batch_size=1, collate=lambda batches: batches[0])


class _Some:
    """Some batches of a loader as a dataset: ``[i]`` is (number of the batch, the batch).

    Args:
        numbers: of the batches that are in it.
    """

    def __init__(
        self, loader: DataLoader[Any], batches: Sequence[Sequence[int]], numbers: Sequence[int], seed: int
    ) -> None:
        self._dataset: Any = loader.dataset
        self._collate: Any = loader.collate_fn
        self._batches = batches
        self._numbers = numbers
        self._seed = seed

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        number = self._numbers[index]
        seed_at(self._seed, "batch", number)
        places = self._batches[number]
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(list(places))
        else:
            samples = [self._dataset[place] for place in places]
        return number, self._collate(samples)


class _Read:
    """Batches of a dataset that can only be iterated over: a worker reads over those that others compute.

    Args:
        length: samples of the dataset.
        seed: of the run.
    """

    def __init__(self, loader: DataLoader[Any], length: int, seed: int) -> None:
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._data = _streams_of(loader.dataset)
        self._seed = seed
        self._collate: Any = loader.collate_fn
        self._length = length
        self.num_samples = length - length % self.batch_size if loader.drop_last else length

    def evaluate(self, run: Run, function: Function, numbers: Sequence[int]) -> None:
        wanted, size = set(numbers), self.batch_size
        num_samples = sum(min(size, self.num_samples - number * size) for number in wanted)

        def collate(rows: list[tuple[int, Any]]) -> tuple[int, Any]:
            number = rows[0][0] // size
            seed_at(self._seed, "batch", number)
            return number, self._collate([row for _, row in rows])

        some = Streams(lambda *_: self._rows(wanted), lengths=[num_samples])
        with warnings.catch_warnings():
            # Reading over the batches of others is how this dataset is shared out, and there is no other way here.
            warnings.filterwarnings("ignore", message="stream 0 of 1 is read over")
            run.evaluate(some, function, batch_size=size, collate=collate)

    def _rows(self, wanted: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Yield the samples of some batches with their places in the dataset.

        Raises:
            UsageError: the dataset has more or fewer samples than it had.
        """
        place = -1
        for place, row in enumerate(_samples(self._data, self._seed)):
            if place >= self._length:
                raise self._other_length("more")
            if place // self.batch_size in wanted:
                yield place, row
        if place + 1 < self._length:
            raise self._other_length(f"{place + 1}")

    def _other_length(self, found: str) -> UsageError:
        return UsageError(
            f"the evaluation dataset gave {found} samples, but its len, or an earlier count, was {self._length}: an "
            "evaluation needs the same samples each time, on each worker. Give a list of them"
        )


_counted: Final = WeakIdKeyDictionary()
"""By dataset, then by seed: its samples, -1 where ``len`` says them, None where it cannot be copied. So they are
counted once in a training. Datasets need no hash.
"""


def _agreed_length(dataset: Any, run: Run) -> int | None:
    """Return the samples of a dataset; None: it cannot be distributed. Collective.

    Raises:
        UsageError: workers have other numbers of samples.
    """
    length = _length(dataset, run.seed)
    lengths = run.all_gather(length) if run.has_begun else [length]
    if None in lengths:
        return None
    if len(set(lengths)) > 1:
        few, many = min(lengths), max(lengths)
        raise UsageError(
            f"the evaluation dataset has {few} samples on one worker, and {many} on another: all workers need the same "
            "samples, which must depend only on the script and the seed (no file that only one machine has, no clock, "
            "no generator that is seeded by itself)"
        )
    return length


def _length(dataset: Any, seed: int) -> int | None:
    known: dict[int, int | None] = _counted.setdefault(dataset, {})
    if seed not in known:
        known[seed] = _counted_now(dataset, seed)
    return len(dataset) if known[seed] == -1 else known[seed]


def _counted_now(dataset: Any, seed: int) -> int | None:
    data = _streams_of(dataset)
    try:
        data.opened(seed, 0, 1, 0)
    except RecipeError:  # it cannot be copied
        return None
    return -1 if has_length(dataset) else sum(1 for _ in _samples(data, seed))


def _streams_of(dataset: Any) -> Streams:
    source = stream_source_of(dataset, "evaluate", batch_size=1)
    assert source is not None
    return source.data


def _samples(data: Streams, seed: int) -> Iterator[Any]:
    """Yield the samples of a dataset in its order."""
    source = iter(data.opened(seed, 0, 1, 0))
    for place in count():
        try:
            yield data.sample(source, seed, 0, 0, place)
        except StopIteration:
            return


class _Size(dict[str, Tensor]):
    """Stands for a batch in the Trainer's loop: it has the number of samples, and no sample."""

    def __init__(self, number: int, num_samples: int) -> None:
        super().__init__(samples=torch.empty(num_samples, 0))
        self.number = number


class _Together:
    """What comes out of batches that all workers compute."""

    def __init__(self, trainer: Trainer, run: Run, batches: EvaluationBatches) -> None:
        self._predict = trainer.prediction_step
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._whole_inputs = "inputs" in trainer.args.include_for_metrics
        self._run = run
        self._batches = batches
        self._outcomes: dict[int, dict[str, Any]] = {}

    def prediction_step(
        self, model: Any, inputs: _Size, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return what the Trainer's own method returns for a batch. Collective at the first call."""
        if not self._outcomes:
            self._compute(model, prediction_loss_only, ignore_keys)
        outcome = self._outcomes.pop(inputs.number)
        inputs.update(outcome["inputs"])
        return outcome["loss"], outcome["logits"], outcome["labels"]

    def _compute(self, model: Any, prediction_loss_only: bool, ignore_keys: list[str] | None) -> None:
        own: dict[int, dict[str, Any]] = {}

        def compute(numbered: tuple[int, Any]) -> dict[str, Any]:
            number, inputs = numbered
            seed_at(self._run.seed, "evaluation", number)
            loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
            kept = inputs if self._whole_inputs else {}
            own[number] = _on_cpu({"loss": loss, "logits": logits, "labels": labels, "inputs": dict(kept)})
            num_samples = find_batch_size(inputs) or 0
            totals = {"samples": num_samples}
            return totals if loss is None else {**totals, "loss": float(loss) * num_samples}

        missing = list(range(-(-self._batches.num_samples // self._batches.batch_size)))
        # Again for what a worker has computed that was lost before it could tell the others.
        while missing := [number for number in missing if number not in self._outcomes]:
            self._batches.evaluate(self._run, compute, missing)
            for outcomes in self._run.all_gather(own) if self._run.has_begun else [own]:
                self._outcomes.update(outcomes)


@contextmanager
def shared(trainer: Trainer, run: Run, batches: EvaluationBatches) -> Iterator[DataLoader[Any]]:
    """Let a trainer predict together with the other workers; yields the loader for its loop. Collective."""
    together = _Together(trainer, run, batches)
    batch_size = batches.batch_size  # may be another than that of args
    sizes: DataLoader[Any] = DataLoader(
        range(batches.num_samples),  # type: ignore[arg-type]
        batch_size=batch_size,
        collate_fn=lambda places: _Size(places[0] // batch_size, len(places)),
    )
    trainer.prediction_step = together.prediction_step
    preprocess, trainer.preprocess_logits_for_metrics = trainer.preprocess_logits_for_metrics, None
    try:
        yield trainer.accelerator.prepare_data_loader(sizes, device_placement=False)
    finally:
        del trainer.prediction_step
        trainer.preprocess_logits_for_metrics = preprocess


def _on_cpu(value: Any) -> Any:
    """Return nested tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(each) for each in value)
    return value
