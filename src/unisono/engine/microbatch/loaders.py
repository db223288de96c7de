"""Torch's `DataLoader` and samplers, read for what Unisono needs of them: the dataset, the order, how a batch is made.

Nothing of a loader is run. Its order becomes a pure function of (seed, epoch) (`unisono.core.orders`), so that
every worker finds the samples of a step by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from unisono.core import orders
from unisono.core.cursor import SampleOrder, seed_of
from unisono.core.errors import RecipeError
from unisono.engine.microbatch.data import Collate, Loading, MapDataset, check_dataset
from unisono.engine.microbatch.randomness import seed_everything
from unisono.system import accelerators

__all__ = [
    "BucketSampler",
    "Source",
    "check_own_batches",
    "check_said_once",
    "has_own_iter",
    "loading_of",
    "order_of",
    "source_of",
]


class BucketSampler(Sampler[int]):
    """A sampler that puts samples of like lengths into one batch, so that little is padded.

    In each epoch every sample comes once. The shuffled samples are taken in pools; each pool is sorted by length and
    cut into batches, and then the batches are shuffled. The last, partial batch of an epoch has samples of any length.

    Give it to `unisono.Run.steps` as ``sampler=``, or to a ``DataLoader`` (together with the same ``batch_size``).
    Outside of Unisono, call `set_epoch` before each epoch.

    Args:
        lengths: (n,) of each sample, in the order of the dataset: a list, a tensor or an array.
        batch_size: samples of a (global) batch.
        pool: batches that are sorted together. More of them make lengths more alike, and the order less random.
        seed: outside of Unisono, where the run's seed does not count.

    Raises:
        RecipeError: a length is negative or not finite, or a number is below 1.
    """

    def __init__(self, lengths: Iterable[float], *, batch_size: int, pool: int = 100, seed: int = 0) -> None:
        self.order = orders.Buckets(_numbers(lengths), batch_size, pool)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is iterated over next. Not needed with Unisono."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.order.num_samples

    def __iter__(self) -> Iterator[int]:
        places = self.order.epoch(self.seed, self.epoch)
        return (places[position] for position in range(len(places)))


@dataclass(frozen=True)
class Source:
    """Where samples come from, in which order, and how they become batches."""

    dataset: MapDataset
    order: SampleOrder
    batch_size: int
    drop_last: bool
    loading: Loading

    def resized(self, batch_size: int) -> Source:
        """Return the same samples in batches of another size; an order by batches gets that size as well."""
        order = self.order.resized(batch_size) if isinstance(self.order, orders.Buckets) else self.order
        return dataclasses.replace(self, order=order, batch_size=batch_size)


def source_of(
    dataset: MapDataset | DataLoader[Any],
    caller: str,
    *,
    shuffles: bool,
    batch_size: int | None = None,
    sampler: Iterable[int] | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    collate: Collate | None = None,
    loader_workers: int | None = None,
) -> Source:
    """Return what a dataset and options, or a ``DataLoader`` alone, say. None: the option was not given.

    Args:
        caller: the function that got them, for errors.
        shuffles: the order of a dataset is shuffled where nothing else is said.

    Raises:
        RecipeError: a loader and an option were given; or the loader or the sampler is of a kind whose order cannot be
            known in advance.
    """
    if isinstance(dataset, DataLoader):
        given = {
            "batch_size": batch_size,
            "sampler": sampler,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "collate": collate,
            "loader_workers": loader_workers,
        }
        check_said_once(caller, given)
        return _of_loader(dataset, caller)
    num_samples = check_dataset(dataset)
    if sampler is not None and shuffle:
        raise RecipeError(f"{caller} got sampler= and shuffle=True: the sampler alone determines the order")
    if sampler is not None:
        order = order_of(sampler, num_samples)
        batch_size = sampler.batch_size if batch_size is None and isinstance(sampler, BucketSampler) else batch_size
    else:
        is_shuffled = shuffles if shuffle is None else shuffle
        order = orders.Shuffled.of(num_samples) if is_shuffled else orders.Sequential.of(num_samples)
    if batch_size is None:
        raise RecipeError(
            f"{caller} needs batch_size=, the number of samples in a global batch (or a DataLoader, which has one)"
        )
    loading = Loading(collate or default_collate, loader_workers or 0)
    return _checked(Source(dataset, order, batch_size, bool(drop_last), loading))


def check_said_once(caller: str, given: Mapping[str, object]) -> None:
    """Raise RecipeError if an option was given beside a DataLoader. None: it was not given."""
    twice = [f"{name}=" for name, value in given.items() if value is not None]
    if twice:
        raise RecipeError(
            f"{caller} got a DataLoader and {', '.join(twice)}: a DataLoader has its own. Set it in the DataLoader, or "
            f"give {caller} the dataset instead"
        )


def has_own_iter(loader: DataLoader[Any]) -> bool:
    """Return whether the class of a DataLoader makes its batches in a way of its own, which nobody else can see."""
    return type(loader).__iter__ is not DataLoader.__iter__


def check_own_batches(loader: DataLoader[Any], instead: str) -> None:
    """Raise RecipeError if a DataLoader makes its batches in another way than torch, or makes none.

    Args:
        instead: what to do, for the error.
    """
    if has_own_iter(loader):
        raise RecipeError(
            f"the loader is a {type(loader).__qualname__}, which makes its batches in its own way (it overrides "
            f"__iter__), and Unisono loads the samples itself; {instead}"
        )
    if loader.batch_sampler is None:
        raise RecipeError(
            "the DataLoader has batch_size=None, so the size of a global batch is unknown; give it a batch_size, or "
            f"{instead}"
        )


def loading_of(loader: DataLoader[Any]) -> Loading:
    """Return how a DataLoader loads its samples."""
    return Loading(
        collate=loader.collate_fn,
        processes=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        context=loader.multiprocessing_context,
    )


def _of_loader(loader: DataLoader[Any], caller: str) -> Source:
    """Read a DataLoader."""
    if isinstance(loader.dataset, IterableDataset):
        check_dataset(loader.dataset)  # raises
    check_own_batches(loader, f"give {caller} the dataset itself, with batch_size=, sampler= and collate=")
    cuts = loader.batch_sampler
    if type(cuts) is not BatchSampler:
        raise RecipeError(
            f"the DataLoader has a batch_sampler of an unknown kind ({type(cuts).__qualname__}), and Unisono cuts the "
            "batches itself; use DataLoader(batch_size=, sampler=) with a sampler of single samples or, for batches "
            "of similar lengths, unisono.BucketSampler(lengths, batch_size=...)"
        )
    dataset: Any = loader.dataset
    num_samples = check_dataset(dataset)
    order = order_of(cuts.sampler, num_samples)
    return _checked(Source(dataset, order, cuts.batch_size, cuts.drop_last, loading_of(loader)))


def _checked(source: Source) -> Source:
    """Return the source.

    Raises:
        RecipeError: the order does not fit the dataset or the batches.
    """
    order, num_samples = source.order, len(source.dataset)
    if num_samples > 0 and order.num_samples < 1:
        raise RecipeError("the sampler gives no samples: an epoch of it has length 0")
    if order.num_indices > num_samples:
        raise RecipeError(
            f"the sampler was made for {order.num_indices} samples, and the dataset has {num_samples}: make the "
            "sampler with the weights, lengths or indices of this dataset"
        )
    if isinstance(order, orders.Buckets) and order.batch_size != source.batch_size:
        raise RecipeError(
            f"the BucketSampler was made for batches of {order.batch_size} samples, and batch_size is "
            f"{source.batch_size}: give both the same number"
        )
    return source


# -- samplers ----------------------------------------------------------------------------------------


def order_of(sampler: Any, num_samples: int) -> SampleOrder:
    """Return the order that a sampler stands for.

    Args:
        num_samples: of the dataset.

    Raises:
        RecipeError: the sampler's order depends on more than the epoch and the global random generators.
    """
    # Exactly these types: a subclass may do something else.
    if type(sampler) is SequentialSampler:
        return orders.Sequential.of(len(sampler))
    if type(sampler) is RandomSampler:
        length = len(sampler.data_source)
        return (orders.Drawn if sampler.replacement else orders.Shuffled)(length, sampler.num_samples)
    if type(sampler) is WeightedRandomSampler:
        weighted = orders.Weighted if sampler.replacement else orders.WeightedOnce
        return weighted(_numbers(sampler.weights), sampler.num_samples)
    if type(sampler) is SubsetRandomSampler:
        return orders.ShuffledSubset(_numbers(sampler.indices))
    if type(sampler) is BucketSampler:
        return sampler.order
    if type(sampler) is DistributedSampler:  # Unisono divides the data itself
        length = check_dataset(sampler.dataset)
        return orders.Shuffled.of(length) if sampler.shuffle else orders.Sequential.of(length)
    return _listed(sampler, num_samples)


def _listed(sampler: Any, num_samples: int) -> SampleOrder:
    kind = type(sampler).__qualname__
    if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        raise RecipeError(
            f"the sampler is a {kind}, and needs __iter__ (the sample indices of an epoch) and __len__ (their number)"
        )
    if (count := getattr(sampler, "num_replicas", 1)) != 1:
        raise RecipeError(
            f"the sampler is a {kind} with num_replicas={count}: it gives one of {count} processes its part of the "
            "data, but Unisono divides the data itself; make it with num_replicas=1, rank=0"
        )
    length = len(sampler)
    listing = _Listing(sampler, length, num_samples)
    # No run's seed: what the sampler gives without shuffling, or a sign of how it shuffles.
    name = f"{kind} {orders.digest(listing(0, 0))}"
    return orders.Listed(length, num_samples, listing, name)


class _Listing:
    """The order of an epoch of a sampler of the script: what it gives after all generators were set for that epoch."""

    def __init__(self, sampler: Any, length: int, num_samples: int) -> None:
        self._sampler, self._length, self._num_samples = sampler, length, num_samples

    def __call__(self, seed: int, epoch: int) -> list[int]:
        first, second = self._take(seed, epoch), self._take(seed, epoch)
        kind = type(self._sampler).__qualname__
        if first != second:
            raise RecipeError(
                f"the sampler {kind} gave two different orders for epoch {epoch}, though the random generators had the "
                "same state: it keeps state from one epoch to the next, or draws from a generator of its own. Its "
                "order must follow from set_epoch(epoch) and the global generators of torch, numpy and random (or a "
                "torch.Generator among its attributes), because each worker calls it separately"
            )
        if len(first) != self._length:
            raise RecipeError(
                f"the sampler {kind} gave {len(first)} samples for epoch {epoch}, and its length is {self._length}; "
                "all epochs need the same number of samples"
            )
        wrong = next((index for index in first if not 0 <= index < self._num_samples), None)
        if wrong is not None:
            raise RecipeError(
                f"the sampler {kind} gave the sample index {wrong}, and the dataset has {self._num_samples} samples"
            )
        return first

    def _take(self, seed: int, epoch: int) -> list[int]:
        held = [
            value for value in getattr(self._sampler, "__dict__", {}).values() if isinstance(value, torch.Generator)
        ]
        with _put_back(held):
            start = seed_of(seed, "order", epoch)
            seed_everything(start)
            for generator in held:
                generator.manual_seed(start)
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            given = list(self._sampler)
        try:
            return [operator.index(index) for index in given]
        except TypeError:
            kinds = sorted({type(index).__qualname__ for index in given} - {"int"})
            raise RecipeError(
                f"the sampler {type(self._sampler).__qualname__} gave values of type {', '.join(kinds)}; Unisono needs "
                "one integer for each sample. A sampler that gives whole batches does not work here: "
                "unisono.BucketSampler makes batches of similar lengths"
            ) from None


@contextlib.contextmanager
def _put_back(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Return a context after which the global generators, and these, are as they were."""
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
    python = random.getstate()
    accelerator = accelerators.used()
    on_device = accelerator.get_rng_state() if accelerator is not None else None
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        if accelerator is not None:
            accelerator.set_rng_state(on_device)
        if numpy is not None and arrays is not None:
            numpy.random.set_state(arrays)


def _numbers(values: Any) -> Any:
    """Return a tensor or an array as a list; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values
