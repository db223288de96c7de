"""From sample indices to the batch on the device.

A dataset needs ``len`` and ``[i]``. Before each sample the random generators are set from
``(seed, epoch, sample index)``, in this process or in a loader process, so an augmentation does not depend on the
process that loads the sample.

Loader processes (torch's `DataLoader`) fetch the micro-batches of the plan ahead. The sampler reads the plan when it
sends out a request. When the plan changes, requested batches that are still useful are kept, the others are dropped,
and batches that were not requested are fetched in this process.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from unisono.decisions.cursor import seed_of
from unisono.errors import RecipeError
from unisono.lifetime import PARENT, bind_to_parent
from unisono.microbatch.randomness import seed_everything
from unisono.process import Process

__all__ = ["Fetcher", "MapDataset", "check_dataset", "to_device"]


class MapDataset(Protocol):
    """A dataset with a length, whose samples are found by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Samples = Callable[[int, int], tuple[int, list[int]]]
"""(step, leaf) -> the epoch, and the sample indices of that micro-batch."""


def check_dataset(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        RecipeError: ``dataset`` is no map-style dataset.
    """
    if isinstance(dataset, DataLoader):
        raise RecipeError(
            "run.steps needs the dataset itself, got a DataLoader, whose batches cannot be divided among the workers; "
            "pass loader.dataset, and batch_size=, collate= and loader_workers= as arguments of run.steps"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RecipeError(
            f"the dataset is a {type(dataset).__qualname__}, which can only be iterated, and Unisono finds samples by "
            "their index; give it __len__ and __getitem__ (a list of the samples will do if they fit in memory)"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise RecipeError(f"the dataset has no length: len(dataset) raised {error}") from error


class Fetcher:
    """Fetches micro-batches.

    Args:
        samples: the cursor's view of the data.
        seed: of the run; augmentation is seeded from it.
        upcoming: the requests (step, leaf) that this worker will probably make next; read when a fetch ahead is sent
            out. Used with loader processes only.
    """

    def __init__(
        self,
        dataset: MapDataset,
        samples: Samples,
        *,
        seed: int,
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None,
        loader_workers: int,
        upcoming: Callable[[], Iterator[tuple[int, int]]] | None = None,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._seed = seed
        self._device = device
        self._collate = collate or default_collate
        # Nothing random happens in a TensorDataset: whole batches can be indexed.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and self._collate is default_collate else None
        self._ahead: _Ahead | None = None
        if loader_workers > 0 and self._tensors is None:
            assert upcoming is not None
            self._ahead = _Ahead(self, upcoming, loader_workers, pin=device.type == "cuda")

    def fetch(self, step: int, leaf: int) -> Any:
        """Return the batch of one micro-batch, on the device."""
        batch = self._ahead.take(step, leaf) if self._ahead is not None else self._fetch_here(step, leaf)
        return to_device(batch, self._device)

    def comes(self, step: int, leaf: int) -> bool:
        """Return whether `fetch` takes this batch from a loader process, if there are any.

        A dataset that opens its files where it is first read must not be read in two processes that share them.
        """
        return self._ahead is None or self._ahead.comes(step, leaf)

    def close(self) -> None:
        """End the loader processes."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def keys(self, step: int, leaf: int) -> list[tuple[int, int]]:
        """Return (sample index, seed for its augmentation) of each sample."""
        epoch, indices = self._samples(step, leaf)
        epoch_seed = seed_of(self._seed, "sample", epoch)
        return [(index, seed_of(epoch_seed, index)) for index in indices]

    def _fetch_here(self, step: int, leaf: int) -> Any:
        if self._tensors is not None:
            _, indices = self._samples(step, leaf)
            index = torch.tensor(indices)
            return [tensor[index] for tensor in self._tensors]
        seeded = _Seeded(self._dataset)
        with _one_thread():
            return self._collate([seeded[key] for key in self.keys(step, leaf)])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Return a context with one thread, as in a loader process (OpenMP does not survive a fork). So a sample has the
    same bits wherever it is computed.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Seeded:
    """The dataset, with the random generators set before each sample."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        seed_everything(seed)
        return self._dataset[index]


class _Ahead:
    """Loader processes that work ahead of the plan."""

    def __init__(
        self, fetcher: Fetcher, upcoming: Callable[[], Iterator[tuple[int, int]]], num_processes: int, *, pin: bool
    ) -> None:
        self._process = Process()
        self._fetcher = fetcher
        self._upcoming = upcoming
        self._sent: collections.deque[tuple[int, int]] = collections.deque()
        self._kept: dict[tuple[int, int], Any] = {}
        loader: DataLoader[Any] = DataLoader(
            _Seeded(fetcher._dataset),  # type: ignore[arg-type]
            batch_sampler=_Sampler(self._requests),
            num_workers=num_processes,
            collate_fn=fetcher._collate,
            pin_memory=pin,
            worker_init_fn=partial(_start_loader_process, os.getpid()),
            generator=torch.Generator(),
        )
        self._batches: Iterator[Any] | None = iter(loader)

    def take(self, step: int, leaf: int) -> Any:
        wanted = (step, leaf)
        while wanted not in self._kept:
            # The sampler sends out the next request during this wait, so look at the sent requests each time.
            if wanted not in self._sent or self._batches is None:
                return self._fetcher._fetch_here(step, leaf)
            batch = next(self._batches)
            arrived = self._sent.popleft()
            if arrived >= (step, 0):
                self._kept[arrived] = batch
        batch = self._kept.pop(wanted)
        self._kept = {request: kept for request, kept in self._kept.items() if request[0] >= step}
        return batch

    def close(self) -> None:
        if not self._process.is_this:
            self._process.keep(self)  # without it, torch would end the processes
            return
        iterator, self._batches = self._batches, None
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def comes(self, step: int, leaf: int) -> bool:
        return (step, leaf) in self._kept or (self._batches is not None and (step, leaf) in self._sent)

    def _requests(self) -> Iterator[list[tuple[int, int]]]:
        known: set[tuple[int, int]] = set()
        while True:
            request = next((r for r in self._upcoming() if r not in known), None)
            if request is None:
                return
            known = {r for r in known if r >= (request[0] - 1, 0)} | {request}
            self._sent.append(request)
            yield self._fetcher.keys(*request)


class _Sampler:
    """A batch sampler made of a function."""

    def __init__(self, requests: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._requests()


def _start_loader_process(parent: int, _: int) -> None:
    os.environ[PARENT] = str(parent)
    bind_to_parent(signal.SIGKILL)
    if sys.platform == "linux":
        # Tensors are handed over through a socket. A name in the file system would stay when this process is killed.
        # A process that connects has to prove that it knows the key of the parent.
        setattr(connection, "arbitrary_address", partial(_nameless_address, connection.arbitrary_address))  # type: ignore[attr-defined]  # noqa: B010


def _nameless_address(original: Callable[[str], Any], family: str) -> Any:
    return f"\0unisono-{secrets.token_hex(16)}" if family == "AF_UNIX" else original(family)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all of its tensors on ``device``; tuples, lists and dicts are searched."""
    if device.type == "cpu":
        return batch
    return _move(batch, device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _move(item, device)) for key, item in value.items())
    if hasattr(value, "to") and callable(value.to):
        return value.to(device)
    return value
