"""The batches of an evaluation, numbered in the order of the dataset, whichever worker computes them.

Random numbers are those of a batch's number and of a sample's place, so a batch that is computed again, because its
worker was lost, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers.trainer_utils import has_length

from unisono.errors import UsageError
from unisono.microbatch.iterables import stream_source_of
from unisono.microbatch.randomness import seed_at
from unisono.microbatch.streams import Streams
from unisono.training.run import Run

__all__ = ["Batches", "batches_of"]

Function = Callable[[tuple[int, Any]], Mapping[str, Any]]
"""(number of a batch, the batch) -> its totals by name."""


class Batches(Protocol):
    """The batches of one evaluation."""

    batch_size: int
    num_samples: int

    def evaluate(self, run: Run, function: Function, numbers: Sequence[int]) -> None:
        """Call a function for the batches with these numbers, each on one worker. Collective."""


def batches_of(loader: Any, run: Run) -> Batches | None:
    """Return the batches of a loader; None: they cannot be numbered in advance. Collective."""
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.dataset, IterableDataset):
        divides = loader.num_workers and loader.worker_init_fn is not None
        return None if loader.batch_size is None or divides else _Read(loader, run)
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

    The samples are counted before, where the dataset has no ``len``.
    """

    def __init__(self, loader: DataLoader[Any], run: Run) -> None:
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        source = stream_source_of(loader.dataset, "evaluate", batch_size=loader.batch_size)
        assert source is not None
        self._data = source.data
        self._seed = run.seed
        self._collate: Any = loader.collate_fn
        self._length = length = _length(loader.dataset, self._data, run.seed)
        self.num_samples = length - length % self.batch_size if loader.drop_last else length

    def evaluate(self, run: Run, function: Function, numbers: Sequence[int]) -> None:
        wanted, size = set(numbers), self.batch_size
        num_samples = sum(min(size, self.num_samples - number * size) for number in wanted)

        def collate(rows: list[tuple[int, Any]]) -> tuple[int, Any]:
            number = rows[0][0] // size
            seed_at(self._seed, "batch", number)
            return number, self._collate([row for _, row in rows])

        some = Streams(lambda *_: self._rows(wanted), lengths=[num_samples])
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
            f"the evaluation dataset gave {found} samples, and by its len, or when they were counted, they were "
            f"{self._length}: an evaluation needs the same samples each time, on each worker. Give a list of them"
        )


_counted: Final[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
"""By dataset without ``len``: its samples, so that they are counted once in a training."""


def _length(dataset: Any, data: Streams, seed: int) -> int:
    if has_length(dataset):
        return len(dataset)
    if dataset not in _counted:
        _counted[dataset] = sum(1 for _ in _samples(data, seed))
    return _counted[dataset]


def _samples(data: Streams, seed: int) -> Iterator[Any]:
    """Yield the samples of a dataset in its order."""
    source = iter(data.opened(seed, 0, 1, 0))
    for place in count():
        try:
            yield data.sample(source, seed, 0, 0, place)
        except StopIteration:
            return
