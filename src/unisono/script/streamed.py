"""Schedule of one call of ``run.steps`` over streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from unisono.core.errors import RecipeError, UsageError
from unisono.core.orders import Sequential, digest
from unisono.core.stream_plan import StreamCursor, StreamSamples
from unisono.engine.microbatch.bookmarks import Bookmarks
from unisono.engine.microbatch.data import Loader, Loading, MakeFetcher, Request
from unisono.engine.microbatch.iterables import StreamSource
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.engine.microbatch.streams import Streams
from unisono.engine.rounds.life import Rounds
from unisono.script.bookmarking import Bookmarking

__all__ = ["Asked", "StreamSchedule", "stream_schedule"]


class Asked:
    """What the calls of ``run.steps`` of one run have asked for: epochs, and samples of streams.

    It counts what the script asks for, not what was done: a worker that skips a call must count alike.

    Attributes:
        num_epochs: of all calls.
        bookmarks: the states of streams that all workers know.
    """

    def __init__(self) -> None:
        self.num_epochs = 0
        self.bookmarks = Bookmarks()
        self._numbers = WeakIdKeyDictionary()  # by dataset
        self._num_datasets = 0
        self._counts = WeakIdKeyDictionary()  # by dataset: (streams, samples of each)

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
                f"microbatches is {num_streams} now: other streams have other samples, so nobody knows where to go on. "
                f"Use microbatches={before}, or make a new object, which begins at the first sample"
            )
        return number

    def add(self, dataset: Any, num_streams: int, number: int) -> None:
        """Note that a call asks for this many samples of each stream."""
        self._counts[dataset] = num_streams, self.of(dataset, num_streams) + number


@dataclass(frozen=True)
class StreamSchedule:
    """What is trained on, and for how long; as `unisono.script.schedule.Schedule`, with streams."""

    dataset: Streams
    loading: Loading
    cursor: StreamCursor
    num_steps: int
    given: Any
    """The script's own dataset."""
    asked: Asked
    key: str
    """Of the data and how they are cut, the same on all workers."""
    inner_steps: int = 1
    """Steps of an iteration: those of a replica in a round of local steps."""
    samples: StreamSamples | None = None
    """Of each micro-batch, where a strategy cuts the data in another way than the cursor."""
    delay: int = 0
    """Iterations of which the results are under way."""

    @property
    def num_epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.num_steps // self.cursor.steps_per_epoch)

    @property
    def num_iterations(self) -> int:
        """Iterations of the training loop: one for each step, or for each round of several."""
        return -(-self.num_steps // self.inner_steps)

    @cached_property
    def bookmarking(self) -> Bookmarking:
        """The exchanges of bookmarks."""
        first, delay = self.cursor.first_sample, self.delay
        return Bookmarking(self.asked.bookmarks, self.key, self.cursor.share, first=first, delay=delay)

    def begins(self) -> None:
        """Note that the samples are asked for, so that the next call goes on after them."""
        if not self.cursor.lengths:
            self.asked.add(self.given, self.cursor.microbatches, self.num_steps * self.cursor.share)

    def fetcher(self, device: torch.device) -> MakeFetcher:
        """Return what makes the `StreamFetcher` of these data."""

        def make(upcoming: Callable[[], Iterator[Request]]) -> Loader:
            reading = StreamFetcher(
                self.dataset,
                self.samples if self.samples is not None else self.cursor,
                device=device,
                loading=self.loading,
                upcoming=upcoming,
                at_once=self.inner_steps,
                find_bookmark=self.bookmarking.find if self.bookmarking.is_of_use() else None,
                behind=self.delay * self.cursor.share,
            )
            self.bookmarking.reads_with(reading)
            return reading

        return make

    def before_step(self, number: int, rounds: Rounds) -> None:
        """Have the workers tell each other where streams can be opened, where it is time for it; also at the end.
        Collective.
        """
        self.bookmarking.exchange((number - 1) * self.inner_steps, number * self.inner_steps, rounds)


def stream_schedule(
    source: StreamSource,
    caller: str,
    *,
    microbatches: int,
    seed: int,
    epochs: int,
    max_steps: int | None,
    asked: Asked,
) -> StreamSchedule:
    """Return the schedule for streams.

    Args:
        caller: the method that got them, for errors.
        seed: of the run.
        asked: what calls of the run before have asked for.

    Raises:
        RecipeError: batch, micro-batches and streams do not fit together, or nothing says when the training ends.
        UsageError: there is no epoch.
    """
    data = source.data
    if epochs < 1:
        raise UsageError(f"epochs must be at least 1, got {epochs}")
    if microbatches < 1:
        raise RecipeError(f"microbatches must be at least 1, got {microbatches}")
    lengths = data.lengths(microbatches)
    if lengths is None and (max_steps is None or epochs != 1):
        raise RecipeError(
            f"{caller} got data that can only be iterated, whose length nobody knows, and so no epoch has an end: say "
            f"{caller}(..., max_steps=...) (without epochs), or unisono.Streams(..., lengths=[...]) with the samples "
            f"of each of the {microbatches} streams (unisono.TarShards counts them)"
        )
    first_sample = 0 if lengths is not None else asked.of(source.given, microbatches)
    if lengths is not None:
        num_samples, num_indices = sum(lengths), max(lengths, default=0) * microbatches
    else:
        num_samples = max(max_steps or 0, 1) * source.batch_size
        num_indices = first_sample * microbatches + num_samples
    cursor = StreamCursor(
        order=Sequential(num_samples, num_indices, data.name),
        batch_size=source.batch_size,
        microbatches=microbatches,
        seed=seed,
        drop_last=source.drop_last,
        first_epoch=asked.num_epochs,
        lengths=lengths or (),
        num_steps=max_steps or 0,
        first_sample=first_sample,
    )
    num_steps = cursor.steps_per_epoch * epochs
    if max_steps is not None:
        num_steps = max(0, min(num_steps, max_steps))
    # With other data, seed or number of streams the states of a checkpoint are those of something else.
    key = f"{asked.number(source.given)}: {data.name}, {microbatches} streams {digest(lengths or ())}, seed {seed}"
    return StreamSchedule(data, source.loading, cursor, num_steps, source.given, asked, key)
