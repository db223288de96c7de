"""Data without a length: streams that give their samples one after the other.

The data are M streams, one for each micro-batch of a step (`unisono.core.stream_plan`). A worker reads the streams of
the micro-batches that it computes. When a micro-batch moves to another worker, that one opens its stream anew and goes
to the same sample: it seeks, it loads a state of the iterable (`unisono.engine.microbatch.bookmarks`), or it counts.

Random numbers are those of a position, as for a map-style dataset: the global generators are set from (seed, epoch)
before a stream is made and before its first sample, and from (seed, epoch, stream, position) before each further one.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from unisono.core.cursor import seed_of
from unisono.core.errors import RecipeError, UsageError
from unisono.core.stream_plan import WantedSamples
from unisono.engine.microbatch.randomness import seed_everything

__all__ = ["Streams", "as_torch_worker", "pass_seed", "seek_of"]

Make = Callable[[int, int, int], Iterable[Any]]
"""(stream, number of streams, epoch) -> an iterable over the samples of this stream."""


class Streams:
    """Data that are read as streams, for `unisono.Run.steps`::

        def stream(index, num_streams, epoch):
            files = sorted(Path("data").glob("*.jsonl"))
            random.shuffle(files)  # the same order for all streams of an epoch
            for file in files[index::num_streams]:
                for line in file.open():
                    yield json.loads(line)

        data = unisono.Streams(stream, shuffle=1000)
        for step in run.steps(data, batch_size=64, microbatches=8, max_steps=10_000):
            ...

    Each micro-batch of a step reads a stream of its own: there are M of them, at any number of workers. Together the
    streams give every sample once in an epoch; that is what ``make`` has to care for.

    Args:
        make: (stream, number of streams, epoch) -> an iterable. It must give the same samples whenever it is asked: its
            random numbers come from the global generators, which up to the first sample are the same for all streams
            of an epoch. Where the lengths are known, an iterable with ``seek(n)`` (the next iteration begins with
            sample n) is opened in the middle; one with ``state_dict()`` and ``load_state_dict()`` goes on from a state;
            any other is read from its beginning when it moves. A file, which seeks bytes, is refused: yield from it.
        lengths: samples of each stream in an epoch, M numbers; needed for ``run.steps(epochs=...)``. None: unknown; a
            stream that ends begins again with its next epoch, and ``max_steps`` says how long the training is.
        shuffle: shuffle the samples of a stream within windows of this many, as a shuffle buffer of that size does in
            memory and time; 0, the default: no.
        transform: called with each sample, after the shuffling and only for samples that are trained on: decoding,
            augmentation. Random numbers are those of the sample.

    Raises:
        UsageError: ``make`` cannot be called, or ``shuffle`` is negative.
    """

    def __init__(
        self,
        make: Make,
        *,
        lengths: Iterable[int] | None = None,
        shuffle: int = 0,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if not callable(make):
            raise UsageError(
                "unisono.Streams takes a function (stream, num_streams, epoch) -> iterable, and got a "
                f"{type(make).__qualname__}; an IterableDataset can be given to run.steps as it is"
            )
        if shuffle < 0:
            raise UsageError(f"shuffle must be 0 (no shuffling) or the number of samples in a window, got {shuffle}")
        self.make = make
        self.shuffle = shuffle
        self.transform = transform
        self._lengths = tuple(lengths) if lengths is not None else None

    # What a subclass says about itself.

    draws = True
    """Whether making a sample may draw random numbers."""

    divides = False
    """Whether the script's iterable divides the data by itself, so that streams may be alike by mistake."""

    @property
    def name(self) -> str:
        """The data in words, for the recipe."""
        return f"streams, shuffled within {self.shuffle}" if self.shuffle else "streams"

    @property
    def num_streams(self) -> int | None:
        """How many streams there are where a script does not say it, as in an evaluation; None: unknown."""
        return len(self._lengths) if self._lengths is not None else None

    def lengths(self, num_streams: int) -> tuple[int, ...] | None:
        """Return the samples of each stream in an epoch; None: unknown."""
        return self._lengths

    def opened(self, seed: int, stream: int, num_streams: int, epoch: int) -> Iterable[Any]:
        """Return the iterable of a stream, made with the random numbers of its epoch."""
        seed_everything(seed_of(seed, "streams", epoch))
        return self.make(stream, num_streams, epoch)

    def seeks(self, seed: int, wanted: WantedSamples) -> bool:
        """Return whether the streams can be opened in the middle.

        Raises:
            RecipeError: their iterable is a file.
        """
        return seek_of(self.opened(seed, wanted.stream, wanted.num_streams, wanted.epoch), wanted) is not None

    def sample(self, source: Iterator[Any], seed: int, stream: int, epoch: int, position: int) -> Any:
        """Return the next sample of a stream.

        Raises:
            StopIteration: there is none.
        """
        if self.draws and position:
            seed_everything(seed_of(pass_seed(seed, stream, epoch), "sample", position))
        elif self.draws:  # the body of a generator begins now, and it may shuffle the files of the epoch
            seed_everything(seed_of(seed, "streams", epoch))
        return next(source)


def seek_of(source: Any, wanted: WantedSamples) -> Callable[[int], object] | None:
    """Return what lets the next iteration over a stream begin with a sample; None: there is nothing, or the length of
    the stream is unknown.

    Raises:
        RecipeError: the iterable is a file, which is sought by bytes.
    """
    if wanted.length < 0 or not callable(seek := getattr(source, "seek", None)):
        return None
    if isinstance(source, io.IOBase) or hasattr(source, "tell"):
        raise RecipeError(
            f"stream {wanted.stream} of {wanted.num_streams} is a {type(source).__qualname__}, which is a file, or has "
            "seek and tell as a file has: seek(n) of a stream goes to sample n, and that of a file to byte n. Let the "
            "function yield from it, or wrap it in an object whose seek counts samples"
        )
    return seek  # type: ignore[no-any-return]


@contextlib.contextmanager
def as_torch_worker(info: Any) -> Iterator[None]:
    """Return a context in which ``torch.utils.data.get_worker_info()`` is ``info``; None: there are no workers."""
    before, torch_worker._worker_info = torch_worker._worker_info, info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def pass_seed(seed: int, stream: int, epoch: int) -> int:
    """Return the seed of one pass over one stream."""
    return seed_of(seed, "stream", epoch, stream)
