"""A round of ``run.local_steps(delay=1)`` as the script sees it."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Protocol

from unisono.events import StepResult
from unisono.process import Process
from unisono.rounds.arrived import Arrived
from unisono.rounds.gradient import StepContext
from unisono.rounds.overlapped import Due
from unisono.rounds.replicas import ReplicaRound
from unisono.state.packing import from_bytes
from unisono.state.sums import plain
from unisono.training.laterresult import LaterResult
from unisono.training.localround import InnerStep, LocalRound, Replicating
from unisono.training.step import State

__all__ = ["LateLocalRound", "Overlapping"]


class Overlapping(Replicating, Protocol):
    """What a round asks of `unisono.training.overlapped.OverlappedSteps`."""

    @property
    def num_computed(self) -> int: ...

    @property
    def news(self) -> str: ...

    @property
    def playing(self) -> int | None:
        """The round of an earlier iteration that is computed again after a loss; None: none is."""

    @property
    def num_steps(self) -> int:
        """Global batches of the training."""

    def iterate(self, number: int) -> Generator[InnerStep, None, Due | None]:
        """Yield the steps of replicas in an iteration, and apply the mean change of the round before. Collective."""


class LateLocalRound(LaterResult[ReplicaRound], LocalRound):
    """One iteration: the steps of this round, and the mean change of the round before.

    ``loss``, ``totals`` and ``weight`` are those of the round whose change the model has got: in the first iteration
    there is none, and ``loss`` is NaN. The last iteration has no steps.
    """

    def __init__(self, strategy: Overlapping, context: StepContext, number: int, process: Process) -> None:
        super().__init__(strategy, context, number, process)
        self._overlapping = strategy
        self._due: Due | None = None

    @property
    def number_in_loop(self) -> int:
        """Number within ``run.local_steps``, from 0. Within ``for step in round`` that of the round of the step:
        after a loss, steps of the round before may be computed again.
        """
        playing = self._overlapping.playing if self.state is State.INSIDE else None
        return self._number if playing is None else playing

    @property
    def epoch(self) -> int:
        return self._context.cursor.position(max(0, min(self.steps.start, self._last))).epoch

    @property
    def _last(self) -> int:
        return self._overlapping.num_steps - 1

    @property
    def _loss(self) -> float:
        weight, weighted_loss = self._scalars
        if self._due is None:
            return math.nan
        steps = self._strategy.steps_of(self._due.change.number)
        return weighted_loss / (weight if self._context.reduction == "mean" else len(steps))

    @property
    def weight(self) -> float:
        return self._scalars[0] * self._strategy.scale if self._due is not None else math.nan

    def _run(self) -> Iterator[InnerStep]:
        self.state, self._begun = State.INSIDE, True
        context, strategy = self._context, self._overlapping
        try:
            self._due = due = yield from strategy.iterate(self._number)
        except GeneratorExit:
            self._is_left = True
            raise
        self._news, self._num_computed = strategy.news, strategy.num_computed
        if due is not None:
            self._scalars = due.change.scalars
            known = context.tracked.sums
            self._totals = known.learn({replica: from_bytes(sums) for replica, sums in due.change.sums.items()})
            epoch = self._epoch_of(due)
            known.note_loss(self._loss, self._scalars[0], context.phase, epoch)
            known.note(known.begin_step(context.phase, epoch), self._totals, context.phase)
        self._complete(context.inspector)

    def _epoch_of(self, due: Due) -> int:
        return self._context.cursor.position(self._strategy.steps_of(due.change.number).start).epoch

    # -- for the outer loop --------------------------------------------------------------------------

    @property
    def has_result(self) -> bool:
        return self._due is not None

    @property
    def round(self) -> ReplicaRound:
        raise AssertionError("several rounds are under way at the same time")

    @property
    def _came(self) -> Arrived | None:
        return self._due.arrived if self._due is not None else None

    def result(self) -> StepResult:
        due = self._due
        assert due is not None
        steps = self._strategy.steps_of(due.change.number)
        return StepResult(
            step=self._context.first_number + due.change.number,
            epoch=self._epoch_of(due),
            loss=self._loss,
            weight=self.weight,
            samples=sum(self._context.cursor.position(step).num_samples for step in steps),
            digest=f"{due.change.digest:016x}",
            totals=plain(self._totals),
            losses=[],
            unit="round",
        )
