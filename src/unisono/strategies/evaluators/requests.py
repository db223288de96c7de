"""What an evaluation asks for: a dataset in batches, and what is done with each of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from unisono.core.cursor import Cursor
from unisono.core.errors import UsageError
from unisono.engine.microbatch.data import Fetcher, MakeFetcher, MapDataset
from unisono.engine.microbatch.iterables import Dataset, batches_of, stream_source_of
from unisono.engine.microbatch.loaders import source_of
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.engine.rounds.evaluation import BatchSums, Totals, check_batches, evaluate
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.tracked import Tracked

__all__ = ["EvaluationRequest", "Requests", "drive"]

from unisono.strategies.stages.flight import Away

T = TypeVar("T")
Function = Callable[[Any], Mapping[str, Any]]


def drive(playing: Generator[Any, None, T], work: Callable[[Any], object]) -> T:
    """Give all that a generator yields to ``work``, and return what it returns.

    An error of ``work`` goes to the generator, which may survive it: a worker of the group was lost.
    """
    with closing(playing):
        try:
            item = next(playing)
            while True:
                try:
                    work(item)
                except Exception as error:
                    item = playing.throw(error)
                else:
                    item = next(playing)
        except StopIteration as ended:
            value: T = ended.value
            return value


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What a call asks for, checked."""

    samples: int
    batch_size: int
    num_batches: int
    samples_of: Callable[[int], int]
    """batch -> the number of its samples."""
    make_fetcher: MakeFetcher
    function: Function | None
    """batch -> totals of that batch by name; None: the script has a loop of its own."""
    made_by: Requests

    def play(
        self, rounds: Rounds | None, number: int, sums: BatchSums, at: Callable[[int], None] = lambda batch: None
    ) -> Generator[Any, None, Totals]:
        """Yield batches, and return the totals of all. Collective where there are rounds.

        Args:
            rounds: None: this worker alone.
            number: of the evaluation, for rehearsals.
            sums: where the script adds up what it finds in a batch.
            at: called before each batch, where this worker is alone.
        """
        return evaluate(
            rounds,
            self.made_by.tracked,
            sums,
            self.make_fetcher,
            num_batches=self.num_batches,
            samples_of=self.samples_of,
            seed=self.made_by.seed,
            rehearses=self.made_by.deterministic,
            number=number,
            at=at,
        )

    def compute(
        self,
        rounds: Rounds | None,
        number: int,
        at: Callable[[int], None] = lambda batch: None,
        sums: BatchSums | None = None,
        *,
        of_snapshot: bool = False,
    ) -> Totals:
        """Return the totals that the function gives, over all batches. Collective where there are rounds.

        Args:
            rounds, number, at, sums: as of `play`.
            of_snapshot: the tracked objects are those of a snapshot, which has no states of optimizers.

        Raises:
            UsageError: it gives none for a batch, or reads what a snapshot does not have.
        """
        sums = sums or BatchSums("run.evaluate", fills=False)

        def work(batch: Any) -> None:
            assert self.function is not None
            try:
                with self.made_by.tracked.without_states() if of_snapshot else nullcontext():
                    totals = self.function(batch)
            except Away:
                sums.pass_on()
                return
            if totals is None and sums.has_rows:
                return
            if not isinstance(totals, Mapping):
                raise UsageError(
                    "the function of run.evaluate must return totals by name, e.g. {'correct': 93, 'samples': 100}; "
                    f"got a {type(totals).__qualname__}"
                )
            sums.add(totals)

        return drive(self.play(rounds, number, sums, at), work)


class Requests:
    """Makes requests of the arguments of calls.

    Args:
        deterministic: rehearse batches of other workers.
    """

    def __init__(self, tracked: Tracked, *, seed: int, device: torch.device, deterministic: bool) -> None:
        self.tracked = tracked
        self.seed = seed
        self.deterministic = deterministic
        self._device = device

    def make(
        self,
        dataset: Dataset,
        function: Function | None,
        *,
        batch_size: int | None,
        collate: Callable[[list[Any]], Any] | None,
        loader_workers: int | None,
    ) -> EvaluationRequest:
        """Return what a call asks for; the arguments are those of `unisono.Run.evaluate`.

        Args:
            function: None: a call of ``run.batches``.

        Raises:
            RecipeError, UsageError: the arguments do not fit together.
        """
        options: dict[str, Any] = {"batch_size": batch_size, "collate": collate, "loader_workers": loader_workers}
        what = "run.evaluate" if function is not None else "run.batches"
        if (streams := stream_source_of(dataset, what, **options)) is not None:
            samples = batches_of(streams, self.seed)
            return EvaluationRequest(
                samples=samples.num_samples,
                batch_size=streams.batch_size,
                num_batches=samples.num_batches,
                samples_of=lambda batch: samples.wanted(0, batch).number,
                make_fetcher=lambda upcoming: StreamFetcher(
                    streams.data, samples, device=self._device, loading=streams.loading, upcoming=upcoming
                ),
                function=function,
                made_by=self,
            )
        source = source_of(cast("MapDataset | DataLoader[Any]", dataset), what, shuffles=False, **options)
        num_batches = check_batches(source.order.num_samples, source.batch_size, drop_last=source.drop_last)
        whole = source.batch_size * num_batches  # one step, whose micro-batches are the batches
        cursor = Cursor(order=source.order, batch_size=whole, microbatches=num_batches, seed=self.seed)
        return EvaluationRequest(
            samples=source.order.num_samples,
            batch_size=source.batch_size,
            num_batches=num_batches,
            samples_of=lambda batch: len(cursor.position(0).leaf(batch)),
            make_fetcher=lambda upcoming: Fetcher(
                source.dataset, cursor, device=self._device, loading=source.loading, upcoming=upcoming
            ),
            function=function,
            made_by=self,
        )
