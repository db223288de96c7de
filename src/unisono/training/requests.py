"""What a call of ``run.evaluate`` asks for: the dataset in batches, and the function that computes their totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader

from unisono.decisions.cursor import Cursor
from unisono.microbatch.data import Fetcher, MakeFetcher, MapDataset
from unisono.microbatch.iterables import Dataset, batches_of, stream_source_of
from unisono.microbatch.loaders import source_of
from unisono.microbatch.streamfetcher import StreamFetcher
from unisono.rounds.auditing import Audits
from unisono.rounds.evaluation import Totals, check_batches, evaluate
from unisono.rounds.life import Rounds
from unisono.state.tracked import Tracked

__all__ = ["Compute", "Request", "Requests"]


class Compute(Protocol):
    """Computes totals. Collective where there are rounds."""

    def __call__(self, rounds: Rounds | None, number: int, at: Callable[[int], None] = ...) -> Totals:
        """
        Args:
            rounds: None: this worker alone.
            number: of the evaluation, for rehearsals.
            at: called before each batch, where this worker is alone.
        """


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call asks for, checked."""

    samples: int
    batch_size: int
    compute: Compute


class Requests:
    """Makes requests of the arguments of calls.

    Args:
        deterministic: rehearse batches of other workers.
        audits: go on without workers that are wrong where some differ; None: that is an error.
    """

    def __init__(
        self, tracked: Tracked, *, seed: int, device: torch.device, deterministic: bool, audits: Audits | None
    ) -> None:
        self._tracked = tracked
        self._seed = seed
        self._device = device
        self._deterministic = deterministic
        self._audits = audits

    def make(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None,
        collate: Callable[[list[Any]], Any] | None,
        loader_workers: int | None,
    ) -> Request:
        """Return what a call asks for; the arguments are those of `unisono.training.evaluating.Evaluating.evaluate`.

        Raises:
            RecipeError, UsageError: the arguments do not fit together.
        """
        options: dict[str, Any] = {"batch_size": batch_size, "collate": collate, "loader_workers": loader_workers}
        if (streams := stream_source_of(dataset, "run.evaluate", **options)) is not None:
            samples = batches_of(streams, self._seed)
            return self._request(
                lambda upcoming: StreamFetcher(
                    streams.data, samples, device=self._device, loading=streams.loading, upcoming=upcoming
                ),
                function,
                num_samples=samples.num_samples,
                num_batches=samples.num_batches,
                batch_size=streams.batch_size,
            )
        source = source_of(cast("MapDataset | DataLoader[Any]", dataset), "run.evaluate", shuffles=False, **options)
        num_batches = check_batches(source.order.num_samples, source.batch_size, drop_last=source.drop_last)
        whole = source.batch_size * num_batches  # one step, whose micro-batches are the batches
        cursor = Cursor(order=source.order, batch_size=whole, microbatches=num_batches, seed=self._seed)
        return self._request(
            lambda upcoming: Fetcher(
                source.dataset, cursor, device=self._device, loading=source.loading, upcoming=upcoming
            ),
            function,
            num_samples=source.order.num_samples,
            num_batches=num_batches,
            batch_size=source.batch_size,
        )

    def _request(
        self,
        make_fetcher: MakeFetcher,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        num_samples: int,
        num_batches: int,
        batch_size: int,
    ) -> Request:
        def compute(rounds: Rounds | None, number: int, at: Callable[[int], None] = lambda batch: None) -> Totals:
            return evaluate(
                rounds,
                self._tracked,
                function,
                make_fetcher,
                num_batches=num_batches,
                seed=self._seed,
                rehearses=self._deterministic,
                number=number,
                at=at,
                audits=self._audits,
            )

        return Request(samples=num_samples, batch_size=batch_size, compute=compute)
