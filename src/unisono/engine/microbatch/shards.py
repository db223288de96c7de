"""Tar shards as streams (`TarShards`)."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike, fspath
from typing import Any

from unisono.core.cursor import Permutation
from unisono.core.errors import RecipeError
from unisono.core.orders import digest
from unisono.core.stream_plan import ShardPiece, cut
from unisono.engine.microbatch.streams import Streams
from unisono.engine.microbatch.tarfiles import count_samples, samples_of

__all__ = ["TarShards"]


class TarShards(Streams):
    """Tar files with samples, as WebDataset writes and reads them, for `unisono.Run.steps`::

        data = unisono.TarShards("s3://bucket/train-{000..127}.tar", lengths=1000, shuffle=5000, transform=decode)
        for step in run.steps(data, batch_size=256, microbatches=8, epochs=10):
            for images, labels in step:
                ...

    A sample is a dict of the bytes of its files by their endings (``jpg``, ``cls``, ``json``), with ``__key__``; decode
    them with ``transform``. All samples of all shards, in a row, are cut into M streams of the same length up to one
    sample. An epoch gives each of them once.

    Args:
        shards: paths, or URLs that fsspec opens; a single text with numbers in braces stands for many.
        lengths: samples of each shard: one number for all, or a list. None: counted at the first use, by the headers of
            the files, which is quick on a local disk and reads everything over a network.
        shuffle: 0: the order of the shards. Else the shards of a stream are shuffled in each epoch, and its samples
            within windows of this many.
        transform: called with each sample that is trained on.

    Raises:
        RecipeError: there is no shard, or there are not as many lengths as shards.
    """

    draws = False

    def __init__(
        self,
        shards: str | PathLike[str] | Iterable[str | PathLike[str]],
        *,
        lengths: int | Sequence[int] | None = None,
        shuffle: int = 1000,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(self._stream, shuffle=shuffle, transform=transform)
        given = [shards] if isinstance(shards, (str, PathLike)) else list(shards)
        self.shards = [path for one in given for path in _expanded(fspath(one))]
        if not self.shards:
            raise RecipeError("unisono.TarShards got no shard: an empty list of paths")
        self._counts = [lengths] * len(self.shards) if isinstance(lengths, int) else lengths and list(lengths)
        if self._counts is not None and len(self._counts) != len(self.shards):
            raise RecipeError(
                f"unisono.TarShards got {len(self.shards)} shards and {len(self._counts)} lengths: give the samples of "
                "each shard, one number for all, or nothing"
            )

    @property
    def counts(self) -> Sequence[int]:
        """Samples of each shard."""
        if self._counts is None:
            self._counts = [count_samples(path) for path in self.shards]
        return self._counts

    @property
    def name(self) -> str:
        # Not the folders, which may be others on another machine.
        names = [path.rpartition("/")[2] for path in self.shards]
        sign = digest([*(zlib.crc32(name.encode()) for name in names), *self.counts])
        return f"{len(names)} tar shards {sign}, shuffled within {self.shuffle}"

    @property
    def num_streams(self) -> int:
        return min(len(self.shards), sum(self.counts))

    def lengths(self, num_streams: int) -> tuple[int, ...]:
        return tuple(sum(one.stop - one.first for one in pieces) for pieces in cut(self.counts, num_streams))

    def _stream(self, stream: int, num_streams: int, epoch: int) -> Iterable[Any]:
        pieces = cut(self.counts, num_streams)[stream]
        if self.shuffle:
            order = Permutation(len(pieces), random.getrandbits(63))
            pieces = [pieces[order[place]] for place in range(len(pieces))]
        return _Pieces(self.shards, self.counts, pieces)


class _Pieces:
    """The samples of parts of shards, one after the other."""

    def __init__(self, shards: Sequence[str], counts: Sequence[int], pieces: Sequence[ShardPiece]) -> None:
        self._shards, self._counts, self._pieces = shards, counts, pieces
        self._first = 0

    def seek(self, sample: int) -> None:
        """Let the next iteration begin with this sample."""
        self._first = sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        left = self._first
        for shard, first, stop in self._pieces:
            length = stop - first
            if left >= length:
                left -= length
                continue
            yield from self._of(shard, first + left, stop)
            left = 0

    def _of(self, shard: int, first: int, stop: int) -> Iterator[dict[str, Any]]:
        number, is_last = first, stop == self._counts[shard]
        for sample in samples_of(self._shards[shard], first):
            if number == stop:
                raise self._other_length("more than", shard)
            yield sample
            number += 1
            if number == stop and not is_last:
                return
        if number < stop:
            raise self._other_length(f"{number} samples, not", shard)

    def _other_length(self, found: str, shard: int) -> RecipeError:
        return RecipeError(
            f"the shard {self._shards[shard]} has {found} {self._counts[shard]} samples, which is what lengths= says: "
            "give the true number for each shard, or leave lengths out and let them be counted"
        )


def _expanded(path: str) -> list[str]:
    """Return the paths that ``{000..127}`` stands for, and ``{a,b}``.

    Raises:
        RecipeError: the first number is larger than the last.
    """
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", path)
    if found is None:
        return [path]
    first, last, choices = found.groups()
    if not choices and int(first) > int(last):
        raise RecipeError(
            f"unisono.TarShards got {path}: {found.group()} counts from {int(first)} to {int(last)}, which names no "
            "shard; say the smaller number first"
        )
    texts = choices.split(",") if choices else [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [each for text in texts for each in _expanded(path[: found.start()] + text + path[found.end() :])]
