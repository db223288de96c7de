"""From streams to the batch on the device.

A loader process reads the streams whose number leaves its own rest when it is divided by the number of loader
processes: a stream that went from one process to another would be opened again each time. So the processes of a worker
share out its streams, and more of them than it has streams have nothing to do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from unisono.decisions.streams import StreamSamples
from unisono.microbatch.data import Ahead, Loading, Request, one_thread, to_device
from unisono.microbatch.streamreader import Reader
from unisono.microbatch.streams import Streams

__all__ = ["StreamFetcher"]

LOOK_AHEAD = 4
"""Steps of a full batch that are searched for something that a loader process can do."""


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
        self._device = device
        self._collate = loading.collate
        # What torch stacks is a copy already.
        self._reader = Reader(data, samples.seed, copies=loading.collate is not default_collate)
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
        ahead = self._ahead_of(step, leaf)
        batch = ahead.take((step, turn, leaf)) if ahead is not None else self.fetch_here(step, leaf)
        return to_device(batch, self._device)

    def comes(self, step: int, leaf: int, turn: int = 0) -> bool:
        """Return whether `fetch` takes this batch from a loader process, if there are any."""
        ahead = self._ahead_of(step, leaf)
        return ahead is None or ahead.comes((step, turn, leaf))

    def fetch_here(self, step: int, leaf: int) -> Any:
        """Return the batch of one micro-batch, made in this process."""
        with one_thread():
            return self._collate(self._reader.read(self._samples.wanted(step, leaf)))

    def close(self) -> None:
        """End the loader processes."""
        for ahead in self._aheads:
            ahead.close()
        self._aheads = []

    def _ahead_of(self, step: int, leaf: int) -> Ahead | None:
        """Return the loader process that reads the stream of a micro-batch."""
        return self._aheads[self._samples.stream(step, leaf) % self._num_processes] if self._aheads else None

    def _upcoming_of(self, number: int, upcoming: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        """Yield what is needed next of the streams of one loader process."""
        for step, turn, leaf in itertools.islice(upcoming(), LOOK_AHEAD * self._samples.microbatches):
            if self._samples.stream(step, leaf) % self._num_processes == number:
                yield step, turn, leaf
