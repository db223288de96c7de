"""From sample indices to the batch on the device.

A dataset needs ``len`` and ``[i]``. Before each sample the random generators are set from
``(seed, epoch, sample index)``, in this process or in a loader process, so an augmentation does not depend on the
process that loads the sample.

Loader processes (torch's `DataLoader`) fetch the micro-batches of the plan ahead. The sampler reads the plan when it
sends out a request. When the plan changes, requested batches that are still useful are kept, the others are dropped,
and batches that were not requested are fetched in this process.

A request is (step, turn, leaf); turn counts the passes over the same global batch from 0. Each pass gets a batch of its
own, with the same samples and the same augmentation: the script may change a batch in place.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from unisono.core.errors import RecipeError
from unisono.engine.microbatch.randomness import seed_everything
from unisono.system import accelerators
from unisono.system.lifetime import PARENT, bind_to_parent
from unisono.system.process import Process

__all__ = [
    "Ahead",
    "BatchSource",
    "Fetcher",
    "Loader",
    "Loading",
    "MakeFetcher",
    "MapDataset",
    "Request",
    "Samples",
    "check_dataset",
    "culprits",
    "one_thread",
    "to_device",
]


class MapDataset(Protocol):
    """A dataset with a length, whose samples are found by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Collate = Callable[[list[Any]], Any]
"""A list of samples -> a batch."""
PREFETCH_FACTOR = 2
"""Batches that a loader process fetches ahead, where nothing is said; that of torch."""
Request = tuple[int, int, int]
"""A batch that is needed: (step, turn, leaf)."""


class Samples(Protocol):
    """The samples of each micro-batch (`unisono.core.cursor.Cursor`)."""

    def indices(self, step: int, leaf: int) -> Sequence[int]:
        """Return the sample indices of a micro-batch."""

    def keys(self, step: int, leaf: int) -> Sequence[tuple[int, int]]:
        """Return (sample index, seed of its augmentation) of each sample of a micro-batch."""


class BatchSource(Protocol):
    """Where micro-batches come from (`Fetcher`)."""

    def fetch(self, step: int, leaf: int, turn: int = 0) -> Any:
        """Return the batch of one micro-batch, on the device."""

    def comes(self, step: int, leaf: int, turn: int = 0) -> bool:
        """Return whether `fetch` takes this batch from a loader process, if there are any."""

    def is_near(self, step: int, leaf: int) -> bool:
        """Return whether this process can make a batch without reading far for it."""


class Loader(BatchSource, Protocol):
    """Micro-batches of a training loop, and the processes that load them (`Fetcher`)."""

    def close(self) -> None:
        """End the loader processes."""


MakeFetcher = Callable[[Callable[[], Iterator[Request]]], Loader]
"""Makes what fetches the data; gets what yields the micro-batches that will probably be needed next."""


@dataclass(frozen=True)
class Loading:
    """How samples are loaded; what torch's ``DataLoader`` calls the same has the same meaning."""

    collate: Collate = default_collate
    processes: int = 0
    """Loader processes of each worker; 0 loads in the worker itself."""
    prefetch_factor: int | None = None
    timeout: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    context: Any = None
    """Of module multiprocessing: how the processes are started; None: the default."""


def check_dataset(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        RecipeError: ``dataset`` is no map-style dataset.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RecipeError(
            f"the dataset is a {type(dataset).__qualname__}, which can only be iterated over, and Unisono finds "
            "samples by index; give it __len__ and __getitem__ (a list of the samples will do if they fit in memory), "
            "or read it as streams: unisono.Streams(lambda stream, num_streams, epoch: ...)"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise RecipeError(f"the dataset has no length: len(dataset) raised {error}") from error


class Fetcher:
    """Fetches micro-batches.

    Args:
        upcoming: the requests that this worker will probably make next; read when a fetch ahead is sent out. A request
            may stand there more than once. Used with loader processes only.
    """

    def __init__(
        self,
        dataset: MapDataset,
        samples: Samples,
        *,
        device: torch.device,
        loading: Loading = Loading(),
        upcoming: Callable[[], Iterator[Request]] | None = None,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._device = device
        self._collate = loading.collate
        # Nothing random happens in a TensorDataset: whole batches can be indexed.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and self._collate is default_collate else None
        self._ahead: Ahead | None = None
        if loading.processes > 0 and self._tensors is None:
            assert upcoming is not None
            seeded = _Seeded(dataset, loading.collate)
            self._ahead = Ahead(
                seeded,
                samples.keys,
                self.fetch_here,
                dataclasses.replace(loading, collate=seeded.collate),
                upcoming,
                pin=accelerators.pins(device.type),
            )

    def fetch(self, step: int, leaf: int, turn: int = 0) -> Any:
        """Return the batch of one micro-batch, on the device.

        Args:
            turn: counts the passes over the same global batch.
        """
        batch = self._ahead.take((step, turn, leaf)) if self._ahead is not None else self.fetch_here(step, leaf)
        return to_device(batch, self._device)

    def comes(self, step: int, leaf: int, turn: int = 0) -> bool:
        """Return whether `fetch` takes this batch from a loader process, if there are any.

        A dataset that opens its files where it is first read must not be read in two processes that share them.
        """
        return self._ahead is None or self._ahead.comes((step, turn, leaf))

    def is_near(self, step: int, leaf: int) -> bool:
        """Return True: samples are found by their index."""
        return True

    def close(self) -> None:
        """End the loader processes."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def fetch_here(self, step: int, leaf: int) -> Any:
        """Return the batch of one micro-batch, made in this process."""
        if self._tensors is not None:
            index = torch.tensor(self._samples.indices(step, leaf))
            return [tensor[index] for tensor in self._tensors]
        seeded = _Seeded(self._dataset, self._collate)
        with one_thread():
            return seeded.collate([seeded[key] for key in self._samples.keys(step, leaf)])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
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
    """The dataset, with the random generators set before each sample; an exception says which samples it comes from."""

    def __init__(self, dataset: MapDataset, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._indices: list[int] = []  # of the samples since the last batch

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        seed_everything(seed)
        try:
            sample = self._dataset[index]
        except Exception as error:
            self._indices.clear()
            error.add_note(f"(in sample {index})")
            raise
        self._indices.append(index)
        return sample

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of the samples that were fetched last."""
        indices, self._indices = self._indices, []
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(_in_batch(indices, str(error)))
            raise


def _in_batch(indices: Sequence[int], message: str) -> str:
    """Return the note for an exception with this message, which was raised where a batch was made of these samples."""
    named = dict.fromkeys(int(entry) for entry in re.findall(r"(?:entry|tensor number) (\d+)", message))
    entries = [f"entry {entry} is sample {indices[entry]}" for entry in named if entry < len(indices)]
    return f"(in collate, of samples {', '.join(map(str, indices))}{''.join(f'; {one}' for one in entries)})"


def culprits(error: BaseException) -> list[int]:
    """Return the sample that an exception of a dataset comes from, in this process or in a loader process, or those of
    the batch that could not be made; empty: it comes from elsewhere.
    """
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    found = re.findall(r"^\(in (?:sample|collate, of samples) ([\d, ]+)", text, re.MULTILINE)
    return [int(index) for index in found[-1].split(", ")] if found else []


class _Failed:
    """What a loader process has raised instead of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Ahead:
    """Loader processes that work ahead of the plan.

    Args:
        dataset: gives the samples of a key, as a dataset of torch does.
        keys: (step, leaf) -> the keys of the samples of a micro-batch.
        fetch_here: (step, leaf) -> the batch, made in this process.
        upcoming: the requests that will probably be made next.
    """

    def __init__(
        self,
        dataset: Any,
        keys: Callable[[int, int], Sequence[Any]],
        fetch_here: Callable[[int, int], Any],
        loading: Loading,
        upcoming: Callable[[], Iterator[Request]],
        *,
        pin: bool,
    ) -> None:
        self._process = Process()
        self._keys = keys
        self._fetch_here = fetch_here
        self._upcoming = upcoming
        self._depth = loading.processes * (loading.prefetch_factor or PREFETCH_FACTOR)
        self._sent: collections.deque[Request] = collections.deque()
        self._counts: collections.Counter[Request] = collections.Counter()
        self._kept: collections.defaultdict[Request, list[Any]] = collections.defaultdict(list)
        method = (loading.context or multiprocessing).get_start_method()
        # A process that comes from the fork server has that one as its parent, and ends with it.
        parent = os.getpid() if method != "forkserver" else None
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Sampler(self._next_keys),
            num_workers=loading.processes,
            collate_fn=loading.collate,
            pin_memory=pin,
            prefetch_factor=loading.prefetch_factor,
            timeout=loading.timeout,
            multiprocessing_context=loading.context,
            worker_init_fn=partial(_start_loader_process, parent, loading.worker_init_fn),
            generator=torch.Generator(),
        )
        self._batches: Iterator[Any] | None = iter(loader)

    def take(self, wanted: Request) -> Any:
        step, turn, leaf = wanted
        now = (step, turn, 0)
        self._refill()
        while not self._kept[wanted]:
            # The sampler sends out the next request during this wait, so look at the sent requests each time. Batches
            # that nobody needs any more are taken as well: as long as they stand in the way, no request is sent out.
            is_useful = wanted in self._sent or (self._sent and self._sent[0] < now)
            if self._batches is None or not is_useful:
                return self._fetch_here(step, leaf)
            batch = self._next_batch(self._batches)
            arrived = self._sent.popleft()
            if arrived >= now:
                self._kept[arrived].append(batch)
        batch = self._kept[wanted].pop()
        for request in [request for request in self._kept if request < now]:
            del self._kept[request]
        if isinstance(batch, _Failed):
            raise batch.error
        return batch

    def _next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or what was raised for it: another request than the wanted one may be its cause."""
        try:
            return next(batches)
        except Exception as error:
            if "in DataLoader worker process" not in str(error):  # a process that has ended, or a timeout
                raise
            return _Failed(error)

    def close(self) -> None:
        if not self._process.is_this:
            self._process.keep(self)  # without it, torch would end the processes
            return
        iterator, self._batches = self._batches, None
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def comes(self, request: Request) -> bool:
        return bool(self._kept[request]) or (self._batches is not None and request in self._sent)

    def _next_keys(self) -> list[Any] | None:
        """Return the keys of the next batch to ask for, and note that it was; None: nothing is upcoming now."""
        found = self._next_request(self._counts)
        if found is None:
            return None
        request, keys = found
        self._counts[request] += 1
        self._sent.append(request)
        return list(keys)

    def _refill(self) -> None:
        """Send out requests after a time in which nothing was upcoming: torch does so only when a batch arrives."""
        put = getattr(self._batches, "_try_put_index", None)
        if put is not None and not self._sent:
            for _ in range(self._depth):
                put()

    def _next_request(self, sent: collections.Counter[Request]) -> tuple[Request, Sequence[Any]] | None:
        """Return the first upcoming request that was not sent as often as it stands there, and its keys; forget those
        of the past. A micro-batch whose samples are all left out is not asked for.
        """
        seen: collections.Counter[Request] = collections.Counter()
        for request in self._upcoming():
            if not seen:
                for past in [past for past in sent if past[0] < request[0]]:
                    del sent[past]
            seen[request] += 1
            if seen[request] > sent[request] and (keys := self._keys(request[0], request[2])):
                return request, keys
        return None


class _Sampler:
    """A batch sampler made of a function, which goes on after a time in which that had nothing to give."""

    def __init__(self, next_keys: Callable[[], list[Any] | None]) -> None:
        self._next_keys = next_keys

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        if (keys := self._next_keys()) is None:
            raise StopIteration
        return keys


def _start_loader_process(parent: int | None, then: Callable[[int], None] | None, number: int) -> None:
    if parent is not None:
        os.environ[PARENT] = str(parent)
        bind_to_parent(signal.SIGKILL)
    if sys.platform == "linux":
        # Tensors are handed over through a socket. A name in the file system would stay when this process is killed.
        # A process that connects has to prove that it knows the key of the parent.
        setattr(connection, "arbitrary_address", partial(_nameless_address, connection.arbitrary_address))  # type: ignore[attr-defined]  # noqa: B010
    if then is not None:
        then(number)


def _nameless_address(original: Callable[[str], Any], family: str) -> Any:
    return f"\0unisono-{secrets.token_hex(16)}" if family == "AF_UNIX" else original(family)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all of its tensors on ``device``: what has a method ``to`` is asked (a batch of graphs, a
    packed sequence); tuples, lists and dicts are searched.
    """
    if device.type == "cpu":
        return batch
    return _move(batch, device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to") and callable(value.to):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _move(item, device)) for key, item in value.items())
    return value
