"""From streams to the batch on the device.

A loader process reads the streams whose number leaves its own rest when it is divided by the number of loader
processes: a stream that went from one process to another would be opened again each time. So the processes of a worker
share out its streams, and more of them than it has streams have nothing to do.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from unisono.core.stream_plan import StreamSamples, WantedSamples
from unisono.engine.microbatch.bookmarks import Bookmark, News, Taken
from unisono.engine.microbatch.data import Ahead, Collate, Loading, Request, one_thread, to_device
from unisono.engine.microbatch.streamreader import PATIENCE, LoadedSamples, Reader
from unisono.engine.microbatch.streams import Streams
from unisono.system import accelerators

__all__ = ["StreamFetcher"]

LOOK_AHEAD = 4
"""Steps of a full batch that are searched for something that a loader process can do."""


FAR = 4096
"""Samples over which a stream is not read only to compare a micro-batch."""


class StreamFetcher:
    """Fetches micro-batches from streams. Has the methods of `unisono.engine.microbatch.data.Fetcher`.

    Args:
        upcoming: the requests that this worker will probably make next. Used with loader processes only.
        at_once: batches of one stream that are needed in a row, before some of another one.
        find_bookmark: returns the bookmark from which a reader comes to samples, if one is known; None: none are used.
        behind: samples of each stream, of those fetched last, that may have to be read again: a bookmark lies before.

    Attributes:
        taken: bookmarks that were taken while streams were read.
    """

    def __init__(
        self,
        data: Streams,
        samples: StreamSamples,
        *,
        device: torch.device,
        loading: Loading,
        upcoming: Callable[[], Iterator[Request]] | None = None,
        at_once: int = 1,
        find_bookmark: Callable[[WantedSamples], Bookmark | None] | None = None,
        behind: int = 0,
    ) -> None:
        self._samples = samples
        self._data = data
        self._device = device
        self._find = find_bookmark if find_bookmark is not None else _find_nothing
        self._behind = behind
        self.taken = Taken()
        self._ends: dict[int, WantedSamples] = {}
        """By stream, what follows the batch that was fetched last."""
        self._asked: dict[int, WantedSamples] = {}
        """By stream, what follows the batch that a loader process was asked for last."""
        self._collate = loading.collate
        # What torch stacks is a copy already.
        reader = partial(
            Reader,
            data,
            samples.seed,
            copies=loading.collate is not default_collate,
            at_once=at_once,
            marks=find_bookmark is not None,
        )
        self._reader = reader()
        self._num_elsewhere = collections.Counter[int]()
        """By stream, the batches from a loader process since one was read here."""
        self._can_seek: bool | None = None  # not looked at
        self._num_processes = min(loading.processes, samples.microbatches)
        self._aheads: list[Ahead] = []
        if loading.processes > 0:
            assert upcoming is not None
            one = dataclasses.replace(loading, processes=1, collate=_WithNews(loading.collate))
            self._aheads = [
                Ahead(
                    reader(),
                    self._keys,
                    self._fetch_with_news,
                    one,
                    partial(self._upcoming_of, number, upcoming),
                    pin=accelerators.pins(device.type),
                )
                for number in range(self._num_processes)
            ]

    def fetch(self, step: int, leaf: int, turn: int = 0) -> Any:
        """Return the batch of one micro-batch, on the device.

        Args:
            turn: counts the passes over the same global batch.
        """
        wanted = self._samples.wanted(step, leaf)
        self._ends[wanted.stream] = _end_of(wanted)
        self._num_elsewhere[wanted.stream] += 1
        ahead = self._ahead_of(step, leaf)
        batch, news = ahead.take((step, turn, leaf)) if ahead is not None else self._fetch_with_news(step, leaf)
        self.taken.note(news)
        if news.taken:
            self.bookmarks()  # forgets older ones
        if self._num_elsewhere[wanted.stream] > PATIENCE:  # the first batches of a stream that has moved come from here
            self._reader.close(wanted.stream)
        return to_device(batch, self._device)

    def comes(self, step: int, leaf: int, turn: int = 0) -> bool:
        """Return whether `fetch` takes this batch from a loader process, if there are any, and finds it without reading
        far for it.
        """
        if not self.is_near(step, leaf):
            return False
        ahead = self._ahead_of(step, leaf)
        return ahead is None or ahead.comes((step, turn, leaf))

    def bookmarks(self) -> dict[int, Bookmark]:
        """Return the newest bookmark of each stream that was read, up to what was fetched and is not needed again."""
        behind = self._behind
        return self.taken.newest({stream: end._replace(first=end.first - behind) for stream, end in self._ends.items()})

    def close(self) -> None:
        """End the loader processes."""
        with contextlib.ExitStack() as stack:
            for ahead in self._aheads:
                stack.callback(ahead.close)
        self._aheads = []

    def _fetch_with_news(self, step: int, leaf: int) -> tuple[Any, News]:
        wanted = self._samples.wanted(step, leaf)
        self._num_elsewhere[wanted.stream] = 0
        with one_thread():
            batch = self._collate(self._reader.read(wanted, self._find(wanted), marks=self._marks))
        return batch, self._reader.news()

    @property
    def _marks(self) -> bool:
        """Whether readers are to take bookmarks, as far as they do."""
        return self.taken.able is not False

    def _keys(self, step: int, leaf: int) -> list[tuple[WantedSamples, Bookmark | None, bool]]:
        """Return what a loader process has to read, with a bookmark where that does not follow what it has read."""
        wanted = self._samples.wanted(step, leaf)
        last, self._asked[wanted.stream] = self._asked.get(wanted.stream), _end_of(wanted)
        goes_on = last is not None and (last.epoch, last.first) == (wanted.epoch, wanted.first)
        return [(wanted, None if goes_on else self._find(wanted), self._marks)]

    def _ahead_of(self, step: int, leaf: int) -> Ahead | None:
        """Return the loader process that reads the stream of a micro-batch."""
        return self._aheads[self._samples.stream(step, leaf) % self._num_processes] if self._aheads else None

    def is_near(self, step: int, leaf: int) -> bool:
        """Return whether this worker comes to a micro-batch without reading far.

        If not, it is no micro-batch of its own, but one to compare; or it is the first one of a stream that has moved
        to this worker, which is fetched here, and those after it are near.
        """
        wanted = self._samples.wanted(step, leaf)
        last = self._ends.get(wanted.stream)
        if last == _end_of(wanted):
            return True  # it was read last
        # What lies behind, or in another epoch, is read from a bookmark or from the beginning.
        begin = last.first if last is not None and last.epoch == wanted.epoch and last.first <= wanted.first else 0
        if (bookmark := self._find(wanted)) is not None and self._marks:
            begin = max(begin, bookmark.start)
        return wanted.first - begin <= FAR or self._seeks(wanted)

    def _seeks(self, wanted: WantedSamples) -> bool:
        if self._can_seek is None:
            self._can_seek = self._data.seeks(self._samples.seed, wanted)
        return self._can_seek

    def _upcoming_of(self, number: int, upcoming: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        """Yield what is needed next of the streams of one loader process."""
        for step, turn, leaf in itertools.islice(upcoming(), LOOK_AHEAD * self._samples.microbatches):
            if self._samples.stream(step, leaf) % self._num_processes == number and self.is_near(step, leaf):
                yield step, turn, leaf


class _WithNews:
    """Makes a batch in a loader process, and sends what the reader has found out along with it."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, News]:
        assert isinstance(samples, LoadedSamples)
        return self._collate(list(samples)), samples.news


def _end_of(wanted: WantedSamples) -> WantedSamples:
    """Return what follows, without a number of samples."""
    return wanted._replace(first=wanted.first + wanted.number, number=0)


def _find_nothing(wanted: WantedSamples) -> None:
    return None
