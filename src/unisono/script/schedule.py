"""Schedule of one call of ``run.steps``: its data, how they are cut, and for how many steps."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypedDict, Unpack, cast

import msgspec
import torch
from torch.utils.data import ConcatDataset, DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from unisono.core.cursor import Cursor, Without
from unisono.core.errors import RecipeError, UsageError
from unisono.core.orders import Sequential, digest
from unisono.core.stream_plan import StreamCursor, WantedSamples
from unisono.core.without import Shards, shards_in
from unisono.engine.loop.process_settings import check_whole
from unisono.engine.microbatch.bookmarks import NAME as STREAMS
from unisono.engine.microbatch.bookmarks import Bookmark, Bookmarks
from unisono.engine.microbatch.data import Fetcher, Loader, MakeFetcher, MapDataset, Request
from unisono.engine.microbatch.iterables import Dataset, StreamSource, stream_source_of
from unisono.engine.microbatch.loaders import Source, source_of
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.engine.microbatch.streams import Streams
from unisono.engine.rounds.gathering import TalkRound
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.tracked import Tracked
from unisono.record.without import read_without
from unisono.strategies.local.localround import ReplicaSamples, ReplicaStreams, check_count

__all__ = ["Asked", "Bookmarking", "DataOptions", "Schedule", "check_first_step", "schedule", "shards_of"]

EVERY = 1024
"""Samples of each stream between two exchanges."""
RARELY = 16
"""Delays between two exchanges, at least: each exchange waits for what is under way, which a delay is to hide."""


class Asked:
    """What the calls of ``run.steps`` of one run have asked for: epochs, and samples of streams.

    It counts what the script asks for, not what was done: a worker that skips a call must count alike.

    Args:
        without: the file of the samples that the run leaves out; "": none.

    Attributes:
        num_epochs: of all calls.
        phases: what each call asks for, where samples are left out.
        without: these samples, once a call has said of which data set.
        bookmarks: the states of streams that all workers know.
    """

    def __init__(self, without: str = "") -> None:
        self.num_epochs = 0
        self.phases: list[Schedule] = []
        self.without: Without | None = None
        self._file = without
        self._left_out_of: MapDataset | None = None
        self.bookmarks = Bookmarks()
        self._numbers = WeakIdKeyDictionary()  # by dataset
        self._num_datasets = 0
        self._counts = WeakIdKeyDictionary()  # by dataset: (streams, samples of each)

    def begins(self, planned: Schedule) -> None:
        """Note that a call asks for this."""
        self.num_epochs += planned.num_epochs
        if self._file:
            self.phases.append(planned)

    def left_out_of(self, dataset: MapDataset | None, num_samples: int = 0) -> Without | None:
        """Return the samples of a dataset that the run leaves out, if any.

        Args:
            dataset: None: the data are streams.

        Raises:
            RecipeError: nobody can say which samples are meant. UsageError: the file of the samples is wrong.
        """
        if not self._file:
            return None
        if dataset is None:
            raise RecipeError(
                f"without={self._file} names samples by their index in a dataset, but these data are streams, whose "
                "samples have none: leaving out a sample would change which ones follow it. Leave out the samples "
                "where the streams are made, or give a dataset with len and [i]"
            )
        if self.without is None:
            shards = shards_of(dataset)
            self.without, self._left_out_of = read_without(self._file, num_samples, shards), dataset
        elif dataset is not self._left_out_of:
            raise RecipeError(
                f"without={self._file} names samples of one dataset, but a later run.steps got a different object from "
                "the first, so it is unclear which of the two they belong to. Give each run.steps the same object"
            )
        return self.without

    def used_before(self, phase: int, iterations: int) -> str:
        """Return where the training has used a sample that is left out before some iterations of a phase were done, as
        far as the script asks for it, in words; "": nowhere.
        """
        for number, one in enumerate(self.phases[: phase + 1]):
            steps = min(one.num_steps, iterations * one.inner_steps) if number == phase else one.num_steps
            if (step := one.cursor.first_left_out(steps)) is not None:
                return f"step {step} of its run.steps number {number + 1}"
        return ""

    def number(self, dataset: Any) -> int:
        """Return the number of a dataset among those that the calls have got, which is the same on all workers."""
        if dataset not in self._numbers:
            self._numbers[dataset] = self._num_datasets
            self._num_datasets += 1
        number: int = self._numbers[dataset]
        return number

    def of(self, dataset: Any, num_streams: int) -> int:
        """Return how many samples of each stream earlier calls have asked for.

        Raises:
            RecipeError: they have cut the dataset into another number of streams.
        """
        number: int
        before, number = self._counts.get(dataset, (num_streams, 0))
        if before != num_streams:
            raise RecipeError(
                f"an earlier run.steps of this run has read this {type(dataset).__qualname__} as {before} streams, and "
                f"microbatches is {num_streams} now: different streams have different samples, so the place to "
                f"continue from is unknown. Use microbatches={before}, or make a new object, which begins at the first "
                "sample"
            )
        return number

    def add(self, dataset: Any, num_streams: int, number: int) -> None:
        """Note that a call asks for this many samples of each stream."""
        self._counts[dataset] = num_streams, self.of(dataset, num_streams) + number


class _Letter(msgspec.Struct, frozen=True):
    """What one worker says."""

    able: bool | None
    found: dict[int, Bookmark]


class Bookmarking:
    """The exchanges of one training loop.

    Args:
        bookmarks: those that all workers know, of all data of the run.
        key: of the data, the same on all workers.
        share: samples of each stream in a step.
        first: samples of each stream before the loop.
        delay: steps of which the gradients are under way.
    """

    def __init__(self, bookmarks: Bookmarks, key: str, share: int, *, first: int = 0, delay: int = 0) -> None:
        self._bookmarks = bookmarks
        self._key = key
        self._share, self._first = share, first
        self._every = max(EVERY, RARELY * delay * share)
        self._reading: StreamFetcher | None = None

    def is_of_use(self) -> bool:
        """Return whether these data may have bookmarks. Local, equal on all workers."""
        return not self._bookmarks.has_none(self._key)

    def find(self, wanted: WantedSamples) -> Bookmark | None:
        """Return the bookmark from which a reader comes to these samples, if there is one. Local."""
        return self._bookmarks.find(self._key, wanted)

    def reads_with(self, reading: StreamFetcher) -> None:
        """Note what reads the streams in this loop. Local."""
        self._reading = reading

    def is_due(self, last: int, step: int) -> bool:
        """Return whether it is time for an exchange before a step, where it was asked before step ``last``."""
        before, now = (self._first + at * self._share for at in (last, step))
        return step > 0 and before // self._every != now // self._every

    def exchange(self, last: int, step: int, rounds: Rounds) -> None:
        """Exchange bookmarks before a step of the loop or at its end, where it is time for it. Collective.

        Args:
            last: the step before which this was called last; all workers give the same two numbers.
        """
        if not self.is_due(last, step) or not self.is_of_use():
            return
        round_ = TalkRound(rounds, "an exchange of states of streams", self._letter)
        for _ in rounds.play(round_):
            pass
        letters = [msgspec.msgpack.decode(value, type=_Letter) for value in round_.values]
        self._bookmarks.agree(self._key, [one.able for one in letters], [one.found for one in letters])
        if not self.is_of_use() and self._reading is not None:
            self._reading.taken.stop()

    def _letter(self) -> bytes:
        assert self._reading is not None
        found = {
            stream: bookmark
            for stream, bookmark in self._reading.bookmarks().items()
            if not self._bookmarks.knows(self._key, stream, bookmark)
        }
        return msgspec.msgpack.encode(_Letter(self._reading.taken.able, found))


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """What is trained on, and for how long."""

    cursor: Cursor
    num_steps: int
    is_limited: bool
    """The script says for how many epochs, or steps, it trains."""
    inner_steps: int = 1
    """Steps of an iteration: those of a replica in a round of local steps."""
    samples: ReplicaSamples | None = None
    """Of each micro-batch, where a strategy cuts the data in another way than the cursor."""
    delay: int = 0
    """Iterations of which the results are under way."""

    @property
    @abstractmethod
    def dataset(self) -> MapDataset | Streams: ...

    @property
    def num_epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.num_steps // self.cursor.steps_per_epoch)

    @property
    def num_iterations(self) -> int:
        """Iterations of the training loop: one for each step, or for each round of several."""
        return -(-self.num_steps // self.inner_steps)

    @abstractmethod
    def begins(self, tracked: Tracked) -> None:
        """Note that the training loop begins."""

    @abstractmethod
    def before_step(self, number: int, rounds: Rounds) -> None:
        """Do together what the data need before a step, and at the end. Collective."""

    @abstractmethod
    def fetcher(self, device: torch.device) -> MakeFetcher:
        """Return what makes the fetcher of these data."""


@dataclass(frozen=True, kw_only=True)
class MapSchedule(Schedule):
    """Samples by their index."""

    source: Source

    @property
    def dataset(self) -> MapDataset:
        return self.source.dataset

    def begins(self, tracked: Tracked) -> None:
        pass  # nothing depends on it, as each epoch has its own order

    def before_step(self, number: int, rounds: Rounds) -> None:
        pass  # samples are found by their index on each worker

    def fetcher(self, device: torch.device) -> MakeFetcher:
        def make(upcoming: Callable[[], Iterator[Request]]) -> Loader:
            return Fetcher(
                self.source.dataset,
                self.samples if self.samples is not None else self.cursor,
                device=device,
                loading=self.source.loading,
                upcoming=upcoming,
            )

        return make


@dataclass(frozen=True, kw_only=True)
class StreamSchedule(Schedule):
    """Samples of streams."""

    cursor: StreamCursor
    source: StreamSource
    asked: Asked
    key: str
    """Of the data and how they are cut, the same on all workers."""

    @property
    def dataset(self) -> Streams:
        return self.source.data

    @cached_property
    def bookmarking(self) -> Bookmarking:
        """The exchanges of bookmarks."""
        first, delay = self.cursor.first_sample, self.delay
        return Bookmarking(self.asked.bookmarks, self.key, self.cursor.share, first=first, delay=delay)

    def begins(self, tracked: Tracked) -> None:
        """Note that the samples are asked for, so that the next call goes on after them."""
        tracked.own(STREAMS, self.asked.bookmarks)
        if not self.cursor.lengths:
            self.asked.add(self.source.given, self.cursor.microbatches, self.num_steps * self.cursor.share)

    def fetcher(self, device: torch.device) -> MakeFetcher:
        def make(upcoming: Callable[[], Iterator[Request]]) -> Loader:
            reading = StreamFetcher(
                self.dataset,
                self.samples if isinstance(self.samples, ReplicaStreams) else self.cursor,
                device=device,
                loading=self.source.loading,
                upcoming=upcoming,
                at_once=self.inner_steps,
                find_bookmark=self.bookmarking.find if self.bookmarking.is_of_use() else None,
                behind=self.delay * self.cursor.share,
            )
            self.bookmarking.reads_with(reading)
            return reading

        return make

    def before_step(self, number: int, rounds: Rounds) -> None:
        """Have the workers tell each other where streams can be opened, where it is time for it. Collective."""
        self.bookmarking.exchange((number - 1) * self.inner_steps, number * self.inner_steps, rounds)


class DataOptions(TypedDict, total=False):
    """Arguments of `unisono.Run.steps` that say how the data are cut, and for how long they are trained on."""

    batch_size: int | None
    epochs: int | None
    max_steps: int | None
    sampler: Iterable[int] | None
    shuffle: bool | None
    drop_last: bool | None
    collate: Callable[[list[Any]], Any] | None
    loader_workers: int | None


def schedule(
    dataset: Dataset,
    caller: str,
    *,
    microbatches: int,
    seed: int,
    asked: Asked,
    resized: int | None = None,
    **data: Unpack[DataOptions],
) -> Schedule:
    """Return the schedule that the arguments of a script say; see `unisono.Run.steps` for them.

    Args:
        caller: the method that got them, for errors.
        seed: of the run.
        asked: what calls of the run before have asked for.
        resized: for a trial, the batch size that counts instead of the script's, from wherever the script has it.

    Raises:
        RecipeError: batch, micro-batches and dataset do not fit together, or the order of the data cannot be known in
            advance. UsageError: there is no epoch, or an argument is no whole number.
    """
    options: dict[str, Any] = {**data}
    epochs: int | None = options.pop("epochs", None)
    max_steps: int | None = options.pop("max_steps", None)
    is_limited = epochs is not None or max_steps is not None
    check_whole("microbatches", microbatches)
    check_count("epochs", 1 if epochs is None else epochs)
    for name, number in {"batch_size": options.get("batch_size"), "max_steps": max_steps}.items():
        if number is not None:
            check_whole(name, number)

    def num_steps(cursor: Cursor) -> int:
        if max_steps is None:
            return cursor.steps_per_epoch * (epochs or 1)
        return max(0, max_steps if epochs is None else min(max_steps, cursor.steps_per_epoch * epochs))

    if (streams := stream_source_of(dataset, caller, **options)) is not None:
        asked.left_out_of(None)  # raises
        if resized is not None:
            streams = dataclasses.replace(streams, batch_size=resized)
        cursor = _stream_cursor(streams, caller, microbatches, seed, epochs or 1, max_steps, asked)
        # With other data, seed or number of streams the states of a checkpoint are those of something else.
        kind = f"{streams.data.name}, {microbatches} streams {digest(cursor.lengths)}, seed {seed}"
        return StreamSchedule(
            source=streams,
            cursor=cursor,
            num_steps=num_steps(cursor),
            is_limited=is_limited,
            asked=asked,
            key=f"{asked.number(streams.given)}: {kind}",
        )
    source = source_of(cast("MapDataset | DataLoader[Any]", dataset), caller, shuffles=True, **options)
    if resized is not None:
        source = source.resized(resized)
    by_index = Cursor(
        order=source.order,
        batch_size=source.batch_size,
        microbatches=microbatches,
        seed=seed,
        drop_last=source.drop_last,
        first_epoch=asked.num_epochs,
        without=asked.left_out_of(source.dataset, len(source.dataset)),
    )
    return MapSchedule(source=source, cursor=by_index, num_steps=num_steps(by_index), is_limited=is_limited)


def shards_of(dataset: Any) -> Shards:
    """Return the shards of a data set that says which samples they have: by its attribute ``shards``, or, of a
    ``ConcatDataset``, by their numbers.
    """
    if isinstance(dataset, ConcatDataset):
        ends = [0, *dataset.cumulative_sizes]
        return shards_in({str(at): pair for at, pair in enumerate(pairwise(ends))}, ends[-1])
    shards = getattr(dataset, "shards", None)
    return shards_in(shards, len(dataset)) if isinstance(shards, Mapping) and hasattr(dataset, "__len__") else {}


def _stream_cursor(
    source: StreamSource,
    caller: str,
    microbatches: int,
    seed: int,
    epochs: int,
    max_steps: int | None,
    asked: Asked,
) -> StreamCursor:
    """Return the cursor of streams; the arguments are those of `schedule`.

    Raises:
        RecipeError: batch, micro-batches and streams do not fit together, or nothing says when the training ends.
    """
    if microbatches < 1:
        raise RecipeError(f"microbatches must be at least 1, got {microbatches}")
    lengths = source.data.lengths(microbatches)
    if lengths is None and (max_steps is None or epochs != 1):
        raise RecipeError(
            f"{caller} got data that can only be iterated over, whose length is unknown, so no epoch has an end: use "
            f"{caller}(..., max_steps=...) (without epochs), or unisono.Streams(..., lengths=[...]) with the samples "
            f"of each of the {microbatches} streams (unisono.TarShards counts them)"
        )
    first_sample = 0 if lengths is not None else asked.of(source.given, microbatches)
    if lengths is not None:
        num_samples, num_indices = sum(lengths), max(lengths, default=0) * microbatches
    else:
        num_samples = max(max_steps or 0, 1) * source.batch_size
        num_indices = first_sample * microbatches + num_samples
    return StreamCursor(
        order=Sequential(num_samples, num_indices, source.data.name),
        batch_size=source.batch_size,
        microbatches=microbatches,
        seed=seed,
        drop_last=source.drop_last,
        first_epoch=asked.num_epochs,
        lengths=lengths or (),
        num_steps=max_steps or 0,
        first_sample=first_sample,
    )


def check_first_step(first_step: int, num_steps: int, *, is_first_loop: bool, delay: int) -> None:
    """Raise UsageError unless a training loop of ``num_steps`` can begin with this step."""
    check_whole("first_step", first_step)
    if not 0 <= first_step <= num_steps:
        raise UsageError(f"first_step must be from 0 to the {num_steps} steps of this training loop, got {first_step}")
    if first_step and not is_first_loop:
        raise UsageError(
            f"run.steps(first_step={first_step}) is not the first training loop of this run, and the one before it did "
            "different steps: load the snapshot in a run of its own"
        )
    if first_step and delay:
        raise UsageError(
            f"run.steps(first_step={first_step}, delay={delay}): a snapshot of the script has no gradients that are "
            "still in flight; resume from a checkpoint of the run (unisono.Checkpoints)"
        )
