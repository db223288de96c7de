"""The samples of a step where the data are streams: which stream each micro-batch reads, and from where to where.

The data are M streams, one for each micro-batch, whatever the number of workers. With b samples in a micro-batch, step
s takes the samples ``[s * b, (s + 1) * b)`` of each stream. So a position in the data is a step number, as it is for a
map-style dataset, and whoever computes a micro-batch knows which samples of which stream it needs.

Where the lengths of the streams are known, an epoch gives every sample once: a stream that has ended has no
micro-batch in the rest of the epoch, and the last micro-batch of a stream may be short. Where they are not known, each
stream begins again by itself when it ends, and how long a training is has to be said in steps.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from unisono.core.cursor import Cursor, Permutation, Recipe, StepPosition, check_parts, seed_of
from unisono.core.errors import RecipeError
from unisono.core.orders import digest
from unisono.core.words import count

__all__ = [
    "ShardPiece",
    "StreamBatches",
    "StreamCursor",
    "StreamPart",
    "StreamPosition",
    "StreamSamples",
    "WantedSamples",
    "cut",
    "window_order",
]


class WantedSamples(NamedTuple):
    """Samples of one micro-batch: ``number`` samples of a stream, from sample ``first`` of the epoch on."""

    stream: int
    num_streams: int
    epoch: int
    first: int
    number: int
    length: int
    """Samples of the stream in an epoch; -1: unknown, and ``first`` counts over all passes from the first one on."""


class StreamSamples(Protocol):
    """Where the samples of each micro-batch lie in streams (`StreamCursor`, `StreamBatches`)."""

    @property
    def microbatches(self) -> int:
        """The number of streams."""

    @property
    def seed(self) -> int: ...

    def stream(self, step: int, leaf: int) -> int:
        """Return the stream that a micro-batch reads."""

    def wanted(self, step: int, leaf: int) -> WantedSamples:
        """Return what a micro-batch needs."""


@dataclass(frozen=True)
class StreamPosition(StepPosition):
    """Position of a step in streams."""

    parts: tuple[tuple[int, range], ...] = ()
    """By micro-batch, (stream, its samples): of the streams that have not ended, in their order."""

    @property
    def num_leaves(self) -> int:
        return len(self.parts)

    def leaf(self, index: int) -> range:
        """Return the positions of micro-batch ``index`` in its stream."""
        return self.parts[index][1]


@dataclass(frozen=True, kw_only=True)
class StreamCursor(Cursor):
    """The data part of a recipe where the data are streams: from a step number to samples of each stream.

    The index of a sample is ``position * M + stream``: its position in its stream, counted within the epoch where the
    lengths are known, else from the first pass on.
    """

    lengths: tuple[int, ...] = ()
    """Samples of each stream in an epoch; empty: unknown."""
    num_steps: int = 0
    """Where the lengths are unknown, the steps of this call of ``run.steps``, which count as one epoch."""
    first_sample: int = 0
    """Where the lengths are unknown, the samples that earlier calls have taken of each stream."""

    def __post_init__(self) -> None:
        if self.lengths and len(self.lengths) != self.microbatches:
            raise RecipeError(
                f"the streams have {len(self.lengths)} lengths, and microbatches is {self.microbatches}: each "
                "micro-batch reads a stream of its own, so give one length per micro-batch "
                f"(microbatches={len(self.lengths)})"
            )
        if self.lengths and min(self.lengths) < 1:
            empty = self.lengths.index(min(self.lengths))
            raise RecipeError(
                f"stream {empty} of {self.microbatches} has {self.lengths[empty]} samples, and each needs 1 at least; "
                "use fewer micro-batches, or cut the data differently"
            )
        super().__post_init__()
        if self.drop_last and self.lengths and min(self.lengths) < self.share:
            raise RecipeError(
                f"drop_last=True leaves nothing of an epoch: the shortest stream has {min(self.lengths)} samples, and "
                f"a micro-batch takes {self.share}; use a smaller batch_size, or drop_last=False"
            )

    @property
    def share(self) -> int:
        """Samples of a full micro-batch."""
        return self.batch_size // self.microbatches

    @property
    def recipe(self) -> Recipe:
        recipe = super().recipe
        if not self.lengths:
            del recipe["num_samples"]  # it follows from the number of steps, which may change
            recipe["order"] = f"{self.order.name}, from sample {self.first_sample} on"
        else:
            recipe["order"] = f"{self.order.name}, lengths {digest(self.lengths)}"
        return recipe

    @property
    def steps_per_epoch(self) -> int:
        if not self.lengths:
            return max(1, self.num_steps)
        if self.drop_last:
            return min(self.lengths) // self.share
        return -(-max(self.lengths) // self.share)

    def position(self, step: int) -> StreamPosition:
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.lengths:
            first = within * self.share
            parts = tuple(
                (stream, range(first, min(first + self.share, length)))
                for stream, length in enumerate(self.lengths)
                if first < length
            )
        else:
            first = self.first_sample + step * self.share
            parts = tuple((stream, range(first, first + self.share)) for stream in range(self.microbatches))
        return StreamPosition(
            number=step,
            epoch=self.first_epoch + epoch,
            first=first,
            num_samples=sum(len(samples) for _, samples in parts),
            microbatch_size=self.share,
            parts=parts,
        )

    def indices(self, step: int, leaf: int) -> list[int]:
        stream, samples = self.position(step).parts[leaf]
        return [sample * self.microbatches + stream for sample in samples]

    def stream(self, step: int, leaf: int) -> int:
        """Return the stream that a micro-batch reads."""
        if not self.lengths or (step % self.steps_per_epoch + 1) * self.share <= min(self.lengths):
            return leaf  # no stream has ended
        return self.position(step).parts[leaf][0]

    def wanted(self, step: int, leaf: int) -> WantedSamples:
        """Return what one micro-batch needs."""
        position = self.position(step)
        stream, samples = position.parts[leaf]
        return WantedSamples(
            stream=stream,
            num_streams=self.microbatches,
            epoch=position.epoch if self.lengths else 0,
            first=samples.start,
            number=len(samples),
            length=self.lengths[stream] if self.lengths else -1,
        )


@dataclass(frozen=True, kw_only=True)
class StreamPart(StreamCursor):
    """The streams of one of several replicas, next to each other: the micro-batches that this replica trains on.

    Micro-batches are counted from 0 within the part, streams over all parts.
    """

    part: int
    num_parts: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.microbatches, self.num_parts)
        if self.lengths and not self.drop_last:
            own, all_steps = max(self.lengths[place] for place in self.streams), self.steps_per_epoch
            if -(-own // self.share) < all_steps:
                raise RecipeError(
                    f"streams {self.streams.start} to {self.streams.stop - 1}, which replica {self.part} of "
                    f"{self.num_parts} reads, have at most {own} samples, so they end before the {all_steps} steps of "
                    f"an epoch ({max(self.lengths)} samples of the longest stream, {self.share} in each step), and the "
                    "replica would have none; end the epoch with the first stream by drop_last=True"
                )

    @classmethod
    def of(cls, cursor: StreamCursor, part: int, num_parts: int) -> StreamPart:
        """Return one part of a cursor.

        Raises:
            RecipeError: the streams cannot be distributed so.
        """
        known = {field.name: getattr(cursor, field.name) for field in dataclasses.fields(cursor)}
        return cls(**known, part=part, num_parts=num_parts)

    @property
    def streams(self) -> range:
        """The streams of this part."""
        size = self.microbatches // self.num_parts
        return range(self.part * size, (self.part + 1) * size)

    def position(self, step: int) -> StreamPosition:
        whole = super().position(step)
        parts = tuple(one for one in whole.parts if one[0] in self.streams)
        return dataclasses.replace(whole, num_samples=sum(len(samples) for _, samples in parts), parts=parts)

    def stream(self, step: int, leaf: int) -> int:
        """Return the stream that a micro-batch reads."""
        return self.position(step).parts[leaf][0]


@dataclass(frozen=True)
class StreamBatches:
    """The batches of an evaluation over streams: those of the first stream, then those of the second, and so on."""

    lengths: tuple[int, ...]
    batch_size: int
    seed: int
    drop_last: bool = False
    """Leave out the last batch of each stream when it is partial."""

    @property
    def microbatches(self) -> int:
        return len(self.lengths)

    @property
    def num_batches(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        """By stream, the number of batches up to its end."""
        more = 0 if self.drop_last else self.batch_size - 1
        return list(itertools.accumulate((length + more) // self.batch_size for length in self.lengths))

    @property
    def num_samples(self) -> int:
        if self.drop_last:
            return self.num_batches * self.batch_size
        return sum(self.lengths)

    def stream(self, step: int, leaf: int) -> int:
        """Return the stream that a batch comes from."""
        return bisect.bisect_right(self._ends, leaf)

    def wanted(self, step: int, leaf: int) -> WantedSamples:
        """Return what one batch needs."""
        stream = self.stream(step, leaf)
        first = (leaf - (self._ends[stream - 1] if stream else 0)) * self.batch_size
        length = self.lengths[stream]
        return WantedSamples(stream, len(self.lengths), 0, first, min(self.batch_size, length - first), length)


def window_order(seed: int, window: int, num_samples: int) -> Sequence[int]:
    """Return the order in which the samples of a window are given; the same wherever it is asked.

    Args:
        seed: of the pass over the stream.
        num_samples: of this window; the last one of a pass may be short.
    """
    if num_samples < 2:
        return range(num_samples)
    order = Permutation(num_samples, seed_of(seed, "window", window))
    return [order[position] for position in range(num_samples)]


class ShardPiece(NamedTuple):
    """A part of a shard: samples ``[first, stop)``."""

    shard: int
    first: int
    stop: int


def cut(lengths: Sequence[int], num_streams: int) -> list[list[ShardPiece]]:
    """Cut shards into streams of equal length, up to one sample: stream m gets the m-th part of all samples in a row.

    Args:
        lengths: samples of each shard.

    Raises:
        RecipeError: there are fewer samples than streams.
    """
    total = sum(lengths)
    if total < num_streams:
        raise RecipeError(
            f"{count(len(lengths), 'shard')} with {total} samples in all cannot be cut into {num_streams} streams, one "
            "for each micro-batch; use fewer micro-batches"
        )
    streams: list[list[ShardPiece]] = []
    for stream in range(num_streams):
        low, high = total * stream // num_streams, total * (stream + 1) // num_streams
        pieces, start = [], 0
        for shard, length in enumerate(lengths):
            first, stop = max(low - start, 0), min(high - start, length)
            if first < stop:
                pieces.append(ShardPiece(shard, first, stop))
            start += length
        streams.append(pieces)
    return streams
