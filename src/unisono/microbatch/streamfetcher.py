"""From streams to the batch on the device.

A loader process reads the streams whose number leaves its own rest when it is divided by the number of loader
processes: a stream that went from one process to another would be opened again each time. So the processes of a worker
share out its streams, and more of them than it has streams have nothing to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from unisono.decisions.streams import StreamSamples, Wanted
from unisono.microbatch.data import Ahead, Loading, Request, one_thread, to_device
from unisono.microbatch.streamreader import Reader
from unisono.microbatch.streams import Streams

__all__ = ["StreamFetcher"]

LOOK_AHEAD = 4
"""Steps of a full batch that are searched for something that a loader process can do."""


FAR = 4096
"""Samples over which a stream is not read only to compare a micro-batch."""


class StreamFetcher:
    """Fetches micro-batches from streams. Has the methods of `unisono.microbatch.data.Fetcher`.

    Args:
        upcoming: the requests that this worker will probably make next. Used with loader processes only.
    """

    def __init__(
        self,
        data: Streams,
        samples: StreamSamples,
        *,
        device: torch.device,
        loading: Loading,
        upcoming: Callable[[], Iterator[Request]] | None = None,
    ) -> None:
        self._samples = samples
        self._data = data
        self._device = device
        self._positions: dict[int, tuple[int, int]] = {}
        """By stream, (epoch, position) where the batch that was fetched last ends."""
        self._collate = loading.collate
        # What torch stacks is a copy already.
        self._reader = Reader(data, samples.seed, copies=loading.collate is not default_collate)
        self._can_seek: bool | None = None  # not looked at
        self._num_processes = min(loading.processes, samples.microbatches)
        self._aheads: list[Ahead] = []
        if loading.processes > 0:
            assert upcoming is not None
            one = dataclasses.replace(loading, processes=1)
            self._aheads = [
                Ahead(
                    Reader(data, samples.seed, copies=loading.collate is not default_collate),
                    lambda step, leaf: [samples.wanted(step, leaf)],
                    self.fetch_here,
                    one,
                    partial(self._upcoming_of, number, upcoming),
                    pin=device.type == "cuda",
                )
                for number in range(self._num_processes)
            ]

    def fetch(self, step: int, leaf: int, turn: int = 0) -> Any:
        """Return the batch of one micro-batch, on the device.

        Args:
            turn: counts the passes over the same global batch.
        """
        wanted = self._samples.wanted(step, leaf)
        self._positions[wanted.stream] = wanted.epoch, wanted.first + wanted.number
        ahead = self._ahead_of(step, leaf)
        batch = ahead.take((step, turn, leaf)) if ahead is not None else self.fetch_here(step, leaf)
        return to_device(batch, self._device)

    def comes(self, step: int, leaf: int, turn: int = 0) -> bool:
        """Return whether `fetch` takes this batch from a loader process, if there are any, and finds it without reading
        far for it.
        """
        if not self.is_near(step, leaf):
            return False
        ahead = self._ahead_of(step, leaf)
        return ahead is None or ahead.comes((step, turn, leaf))

    def fetch_here(self, step: int, leaf: int) -> Any:
        """Return the batch of one micro-batch, made in this process."""
        with one_thread():
            return self._collate(self._reader.read(self._samples.wanted(step, leaf)))

    def close(self) -> None:
        """End the loader processes."""
        with contextlib.ExitStack() as stack:
            for ahead in self._aheads:
                stack.callback(ahead.close)
        self._aheads = []

    def _ahead_of(self, step: int, leaf: int) -> Ahead | None:
        """Return the loader process that reads the stream of a micro-batch."""
        return self._aheads[self._samples.stream(step, leaf) % self._num_processes] if self._aheads else None

    def is_near(self, step: int, leaf: int) -> bool:
        """Return whether this worker comes to a micro-batch without reading far.

        If not, it is no micro-batch of its own, but one to compare; or it is the first one of a stream that has moved
        to this worker, which is fetched here, and those after it are near.
        """
        wanted = self._samples.wanted(step, leaf)
        epoch, end = self._positions.get(wanted.stream, (wanted.epoch, 0))
        if (epoch, end) == (wanted.epoch, wanted.first + wanted.number):
            return True  # it was read last
        # What lies behind, or in another epoch, is read from the beginning.
        begin = end if epoch == wanted.epoch and end <= wanted.first else 0
        return wanted.first - begin <= FAR or self._seeks(wanted)

    def _seeks(self, wanted: Wanted) -> bool:
        if self._can_seek is None:
            self._can_seek = self._data.seeks(self._samples.seed, wanted)
        return self._can_seek

    def _upcoming_of(self, number: int, upcoming: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        """Yield what is needed next of the streams of one loader process."""
        for step, turn, leaf in itertools.islice(upcoming(), LOOK_AHEAD * self._samples.microbatches):
            if self._samples.stream(step, leaf) % self._num_processes == number and self.is_near(step, leaf):
                yield step, turn, leaf
