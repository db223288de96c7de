"""Delay: the gradient of step s is applied after the inner loop of step s + D, by definition.

While it is under way the next steps are computed, so a slow link, or a worker that stalls now and then, costs nothing
as long as it takes less than D steps; and no bit depends on when anything arrives. The method is stale synchronous
parallel training with a staleness that is fixed (Ho et al., NIPS 2013; Zheng et al., "DC-ASGD", ICML 2017, look at what
it costs; "ACCO", 2024, hides communication in the same way). `unisono.strategies.delay.pipeline` is how it is done.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from unisono.core.cursor import Cursor, Recipe
from unisono.core.errors import StepError, UsageError
from unisono.engine.loop.step import Step, StepState
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.rounds.gradient import GradientRound, StepContext
from unisono.engine.state.spread import Spread
from unisono.engine.state.tracked import Tracked
from unisono.strategies.delay.pending import Pending
from unisono.strategies.delay.pipeline import Pipeline
from unisono.strategies.delay.prediction import Prediction
from unisono.system.process import Process

__all__ = ["Delayed", "StepOfMore", "check_delay"]

MOST_DELAY = 64
"""Each step under way costs memory for a gradient and for the parameters."""


def check_delay(delay: int, predict: bool, tracked: Tracked) -> None:
    """Check that a training can have a delay, and predict parameters; warn where predictions are no better than noise.

    Raises:
        UsageError: it cannot; says why.
    """
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay <= MOST_DELAY:
        raise UsageError(f"delay must be a number of steps from 0 (none) to {MOST_DELAY}; got {delay!r}")
    if not delay:
        if predict:
            raise UsageError(
                "predict=True computes with the parameters that are expected when a gradient is applied, which are the "
                "current ones when no gradient is in flight. Give a delay, or leave it out"
            )
        return
    for name, value in tracked.objects.items():
        if predict and isinstance(value, torch.optim.SGD) and not any(one["momentum"] for one in value.param_groups):
            warnings.warn(
                f"{name!r} is an SGD without momentum, whose latest update is a single noisy gradient: predict=True "
                "extrapolates from it, and makes such a training worse. Give it momentum, or leave predict=True out",
                stacklevel=3,
            )
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            raise UsageError(
                f"{name!r} is a GradScaler, and run.steps(delay={delay}) applies a gradient {delay} steps after it was "
                "computed, when the scale may have changed. Use bfloat16, which needs no scaler (torch.autocast(..., "
                "dtype=torch.bfloat16)), or delay=0"
            )
        if isinstance(value, Spread):
            raise UsageError(
                f"{name!r} is an optimizer of unisono.shard, whose update is joint work of all workers: it waits for "
                f"the slowest one in every step, so run.steps(delay={delay}) would gain nothing. Use one of the two"
            )
        if isinstance(value, torch.optim.LBFGS):
            raise UsageError(
                f"{name!r} is an LBFGS, which computes the loss of the same batch several times for one update; with "
                f"run.steps(delay={delay}) the parameters have changed by then. Use delay=0"
            )
    if tracked.carried:
        raise UsageError(
            f"{next(iter(tracked.carried))!r} is a unisono.Carried, whose rows each step reads as the previous step "
            f"left them; with run.steps(delay={delay}) the previous step is still in flight. Use delay=0"
        )


class Delayed(Strategy):
    """The strategy of ``run.steps(delay=D)``, D > 0."""

    def __init__(self, delay: int, num_steps: int, pending: Pending, prediction: Prediction | None = None) -> None:
        self.num_more = delay if num_steps else 0
        self._delay = delay
        self._num_steps = num_steps
        self._pending = pending
        self._prediction = prediction
        self.overlaps = prediction is None  # which changes the parameters before the next update does
        self._pipeline: Pipeline | None = None

    @property
    def recipe(self) -> Recipe:
        predicted: Recipe = {"predict": True} if self._prediction is not None else {}
        return {"delay": self._delay, **predicted}

    def num_done(self, number: int) -> int:
        return min(max(0, number - self._delay), self._num_steps)

    def open(self, context: StepContext, first: int) -> None:
        self._context = context
        self._pipeline = Pipeline(context, self._delay, self._num_steps, first, self._pending, self._prediction)

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Step:
        assert self._pipeline is not None
        return DelayedStep(
            self._context, number, self._pipeline, num_steps=self._num_steps, unused=unused, process=process
        )

    def settle(self) -> None:
        assert self._pipeline is not None
        self._pipeline.settle()

    def may_save(self, number: int) -> bool:
        # Before the first update the state is that of the beginning, or of the training before, which has a checkpoint.
        assert self._pipeline is not None
        return not self._pipeline.holds_back and not 0 < number <= self._delay

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.leave()


class StepOfMore(Step):
    """A step of a loop that makes more iterations than it has global batches: whoever has a delay does."""

    _cursor: Cursor
    _num_steps: int
    """Global batches of the loop."""

    @property
    def epoch(self) -> int:
        return self._cursor.position(min(self.number_in_loop, self._num_steps - 1)).epoch

    @property
    def index(self) -> int:
        within = min(self.number_in_loop, self._num_steps - 1) % self._cursor.steps_per_epoch
        return within + max(0, self.number_in_loop - self._num_steps + 1)

    @property
    def is_last_of_epoch(self) -> bool:
        return self.number_in_loop < self._num_steps and self.index + 1 == self._cursor.steps_per_epoch

    @property
    def num_samples(self) -> int:
        return self._cursor.position(self.number_in_loop).num_samples if self.number_in_loop < self._num_steps else 0


class DelayedStep(StepOfMore):
    """One iteration: the micro-batches of one step, and the gradient of an earlier one.

    Several rounds are under way at the same time, so what an iteration says of itself it notes by itself.
    """

    def __init__(
        self,
        context: StepContext,
        number: int,
        pipeline: Pipeline,
        *,
        num_steps: int,
        unused: UnusedGradients,
        process: Process,
    ) -> None:
        super().__init__(context, number, unused=unused, process=process)
        self._cursor = context.cursor
        self._pipeline = pipeline
        self._iteration = number
        self._num_steps = num_steps
        self._begun = False
        if number >= num_steps:
            self._position = context.cursor.position(num_steps - 1)

    # -- what the user reads -------------------------------------------------------------------------

    @property
    def number_in_loop(self) -> int:
        """Number within ``run.steps``, from 0. Within the inner loop that of the step of the micro-batch: after a loss,
        micro-batches of earlier steps may be computed again.
        """
        active = self._pipeline.active if self.state is StepState.INSIDE else None
        return self._iteration if active is None else active.at

    @property
    def _computing(self) -> GradientRound | None:
        return self._pipeline.active

    # -- the inner loop ------------------------------------------------------------------------------

    def again(self, *, reseed: bool = False) -> Iterator[Any]:
        if self.state is StepState.COMPLETE:
            raise StepError(
                f"step.again of {self.name}: with run.steps(delay=) the gradient that is applied now is that of "
                "an earlier step, so another pass over this step's batch would belong to no update. Use delay=0"
            )
        return super().again(reseed=reseed)

    def _run(self, *, reseed: bool = False) -> Iterator[Any]:
        if self.state is not StepState.NEW:
            raise StepError(f"a pass over {self.name} cannot begin: {self.state.value}")
        self.state, self._begun = StepState.INSIDE, True
        self._unused.start_step()
        try:
            self._round = due = yield from self._pipeline.iterate(self._iteration)
        except GeneratorExit:
            self._is_left = True
            raise
        if due is not None:
            self._take(due)
        self._complete()

    # -- for the outer loop --------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self._begun

    @property
    def has_no_microbatch(self) -> bool:
        return self.is_complete and self._pipeline.num_computed == 0

    @property
    def news(self) -> str:
        return self._pipeline.news
