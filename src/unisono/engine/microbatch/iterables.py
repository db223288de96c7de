"""What a script gives as data without a length, read as streams: `Streams`, iterable datasets of torch and of Hugging
Face, and a ``DataLoader`` over one of these.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from unisono.core.cursor import seed_of
from unisono.core.errors import RecipeError
from unisono.core.stream_plan import StreamBatches
from unisono.engine.microbatch.bookmarks import is_stateful
from unisono.engine.microbatch.data import Collate, Loading, MapDataset
from unisono.engine.microbatch.loaders import check_own_batches, check_said_once, loading_of
from unisono.engine.microbatch.streams import Streams, as_torch_worker

__all__ = ["Dataset", "StreamSource", "batches_of", "stream_source_of"]

Dataset = MapDataset | Streams | IterableDataset[Any] | DataLoader[Any]
"""What `unisono.Run.steps` and `unisono.Run.evaluate` take."""


@dataclass(frozen=True)
class StreamSource:
    """Streams, and how their samples become batches."""

    data: Streams
    given: Any
    """The script's own dataset, which is the same object in each call."""
    batch_size: int
    drop_last: bool
    loading: Loading


def stream_source_of(
    dataset: Any,
    caller: str,
    *,
    batch_size: int | None = None,
    sampler: Iterable[int] | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    collate: Collate | None = None,
    loader_workers: int | None = None,
) -> StreamSource | None:
    """Return what is said about streams; None: the dataset is none that can be read as streams.

    Args:
        caller: the function that got them, for errors.

    Raises:
        RecipeError: a loader and an option were given, or an option that has no meaning for streams.
    """
    loader = dataset if isinstance(dataset, DataLoader) else None
    given = loader.dataset if loader is not None else dataset
    data = _streams_of(given)
    if data is None:
        return None
    if sampler is not None or shuffle is not None:
        raise RecipeError(
            f"{caller} got {'sampler' if sampler is not None else 'shuffle'}= for data that can only be iterated over, "
            "whose order is that of the streams; unisono.Streams(..., shuffle=n) shuffles within windows of n samples"
        )
    if loader is not None:
        said = {
            "batch_size": batch_size,
            "drop_last": drop_last,
            "collate": collate,
            "loader_workers": loader_workers,
        }
        check_said_once(caller, said)
        check_own_batches(loader, f"give {caller} the dataset itself, with batch_size= and collate=")
        if loader.worker_init_fn is not None and loader.num_workers:
            raise RecipeError(
                f"{caller} got a DataLoader with worker_init_fn over an IterableDataset: that function runs in loader "
                "processes, and it is not those that divide the data here. Let the dataset's __iter__ read the part "
                "that torch.utils.data.get_worker_info() names, and leave out worker_init_fn"
            )
        assert loader.batch_size is not None
        return StreamSource(data, given, loader.batch_size, loader.drop_last, loading_of(loader))
    if batch_size is None:
        raise RecipeError(
            f"{caller} needs batch_size=, the number of samples in a global batch (or a DataLoader, which has one)"
        )
    loading = Loading(collate or default_collate, loader_workers or 0)
    return StreamSource(data, given, batch_size, bool(drop_last), loading)


def batches_of(source: StreamSource, seed: int) -> StreamBatches:
    """Return the batches of an evaluation over streams.

    Raises:
        RecipeError: nobody knows how many there are.
    """
    lengths = source.data.lengths(source.data.num_streams or 1)
    if lengths is None:
        raise RecipeError(
            "run.evaluate got data that can only be iterated over, whose length is unknown, but it must evaluate every "
            "sample once: give it a list of the samples, unisono.TarShards, or unisono.Streams(..., lengths=[...])"
        )
    batches = StreamBatches(lengths, source.batch_size, seed, source.drop_last)
    if source.batch_size < 1 or min(lengths) < 1 or batches.num_batches < 1:
        raise RecipeError(
            f"run.evaluate got streams of {', '.join(map(str, lengths))} samples, and "
            f"batch_size={source.batch_size}{' with drop_last=True' if source.drop_last else ''}: it needs at least 1 "
            "batch of 1 sample"
        )
    return batches


def _streams_of(dataset: Any) -> Streams | None:
    if isinstance(dataset, Streams):
        return dataset
    if _is_hugging_face(dataset):
        return _OfHuggingFace(dataset)
    return _OfTorch(dataset) if isinstance(dataset, IterableDataset) else None


def _is_hugging_face(dataset: Any) -> bool:
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(dataset).__mro__}
    return "datasets.IterableDataset" in kinds


class _OfTorch(Streams):
    """An ``IterableDataset``: stream m of M is what worker m of M of a DataLoader would read."""

    divides = True

    def __init__(self, dataset: Any) -> None:
        super().__init__(self._stream)
        self._dataset = dataset

    @property
    def name(self) -> str:
        return f"streams of {type(self._dataset).__qualname__}"

    def _stream(self, stream: int, num_streams: int, epoch: int) -> Iterable[Any]:
        kind = _StatefulPart if is_stateful(self._dataset) else _Part
        return kind(self._dataset, stream, num_streams, epoch)


class _Part:
    """The part of an ``IterableDataset`` that one of several DataLoader workers reads: a copy, as in its process."""

    def __init__(self, dataset: Any, stream: int, num_streams: int, epoch: int) -> None:
        # Of the run and the epoch, as the global generator was set with it; torch wants it to fit into 63 bits.
        seed = seed_of(torch.initial_seed(), "part", stream) >> 1
        try:
            self._dataset = copy.deepcopy(dataset)
        except Exception as error:
            raise RecipeError(
                f"the {type(dataset).__qualname__} cannot be copied ({type(error).__name__}: {error}), and each stream "
                "needs its own copy; let it open its files in __iter__, or give run.steps unisono.Streams(lambda "
                "stream, num_streams, epoch: ...)"
            ) from error
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        self._info = torch_worker.WorkerInfo(id=stream, num_workers=num_streams, seed=seed, dataset=self._dataset)

    def __iter__(self) -> Iterator[Any]:
        with as_torch_worker(self._info):
            samples = iter(self._dataset)
        while True:
            with as_torch_worker(self._info):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            yield sample


class _StatefulPart(_Part):
    """Such a part of a dataset that has states."""

    def state_dict(self) -> Any:
        with as_torch_worker(self._info):
            return self._dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        with as_torch_worker(self._info):
            self._dataset.load_state_dict(state)


class _OfHuggingFace(Streams):
    """A ``datasets.IterableDataset``: stream m of M is what node m of M would read."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(self._stream)
        self._dataset = dataset

    @property
    def name(self) -> str:
        return "streams of datasets.IterableDataset"

    def _stream(self, stream: int, num_streams: int, epoch: int) -> Iterable[Any]:
        divided = importlib.import_module("datasets.distributed").split_dataset_by_node
        # The state of an iteration lies in objects that the parts of one dataset share. Tables are not copied.
        try:
            dataset, is_own = copy.deepcopy(self._dataset), True
        except Exception:  # it holds a lock, a client or an open file
            dataset, is_own = self._dataset, False
        part: Iterable[Any] = divided(dataset, rank=stream, world_size=num_streams)
        part.set_epoch(epoch)  # type: ignore[attr-defined]
        return part if is_own else iter(part)  # which has no states
