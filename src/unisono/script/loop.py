"""The outer loop: one call of ``run.steps``, from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.core.cadence import Position
from unisono.core.cursor import Cursor, Recipe
from unisono.core.errors import StepError, UsageError
from unisono.core.rehearsals import is_last_checked
from unisono.core.words import listed
from unisono.engine.exchange.flat import SUM_DTYPE, Extra
from unisono.engine.loop.process_settings import Arithmetic
from unisono.engine.loop.step import Iteration, StepState
from unisono.engine.loop.strategies import Strategy, Upcoming
from unisono.engine.microbatch.data import MakeFetcher
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.guards import (
    Guards,
    UnusedGradients,
    watched_clipping,
    watched_schedulers,
    watched_zero_grad,
)
from unisono.engine.microbatch.losses import Microbatch, Reduction, taken_backward
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.agreement import Agreement
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.taps import Loop
from unisono.engine.state.tracked import Tracked
from unisono.script.course import Course
from unisono.script.modes import check_begun, check_unchanged, modes, unusual
from unisono.script.schedule import Schedule
from unisono.strategies.shard.update import shared_updates
from unisono.system.faults import at_step, point
from unisono.system.process import Process

__all__ = ["Summing", "TrainingLoop", "Wire"]

Wire = Literal["fp32", "bf16"]
"""As what the sums of gradients in float32 travel between hosts."""


@dataclass(frozen=True)
class Summing:
    """How the gradients of a step are summed, as the script says it."""

    reduction: Reduction = "mean"
    """What the script's losses are, over the samples of a micro-batch."""
    wire: Wire = "fp32"
    """As what sums travel; "bf16": they are rounded to it, from a fixed level of the tree on."""

    @property
    def recipe(self) -> Recipe:
        """What it adds to the recipe of the phase."""
        return {"wire": "bf16"} if self.wire == "bf16" else {}

    def check(self, tracked: Tracked) -> None:
        """Raise UsageError unless both have a meaning, and the wire does something for what is tracked."""
        if self.wire not in ("fp32", "bf16"):
            raise UsageError(
                'wire must be "fp32" or "bf16", the type in which sums of gradients travel between hosts; got '
                f"{self.wire!r}"
            )
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f'reduction must be "mean" or "sum", like the losses of torch; got {self.reduction!r}')
        dtypes = {parameter.dtype for _, parameter in tracked.parameters()}
        if self.wire == "bf16" and dtypes and not any(SUM_DTYPE.get(one, one) == torch.float32 for one in dtypes):
            names = listed(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise UsageError(
                f'wire="bf16" rounds sums of gradients in float32, and the parameters of this model are {names}, whose '
                "sums are wider: it would change nothing. Leave it out, or train in float32"
            )


class TrainingLoop:
    """One call of ``run.steps``.

    Args:
        course: is told of each step, before and after the script has it.
        planned: the data, how they are cut, and for how many steps.

    Attributes:
        cursor: of the data.
        strategy: what a step is.
        num_steps: iterations that have data.
        step: the one that the script got last; None before the first and after the last.
        is_open: whether the script is between the first step and the end of the loop.
    """

    def __init__(
        self,
        course: Course,
        process: Process,
        arithmetic: Arithmetic,
        *,
        planned: Schedule,
        strategy: Strategy,
        summing: Summing,
    ) -> None:
        self.cursor: Cursor = planned.cursor
        self.num_steps = planned.num_iterations
        self.step: Iteration | None = None
        self.is_open = False
        self._rounds = course.rounds
        self._tracked = course.rounds.tracked
        self._keeper = course.keeper
        self._process = process
        self._course = course
        self._arithmetic = arithmetic
        self._planned = planned
        self.strategy = strategy
        self._summing = summing
        self._phase = 0
        self._base = 0  # steps of the run before this loop
        self._clock = Clock()  # of `run`: the time before it belongs to no step
        self._folder: GradientFolder | None = None
        self._has_left = False
        self._unused = UnusedGradients(self._tracked)

    @property
    def recipe(self) -> Recipe:
        """What the bits of its steps depend on: the data, the strategy, whether sums are rounded, modes of torch."""
        found = unusual(modes(), threads=self._arithmetic.threads)
        chosen: Recipe = {"modes": found} if found else {}
        return {**self.cursor.recipe, **self.strategy.recipe, **self._summing.recipe, **chosen}

    @property
    def end(self) -> int:
        """Steps of the run at the end of this loop."""
        return self._base + self.num_steps

    # -- the loop ------------------------------------------------------------------------------------

    def run(self, phase: int, first: int, make_fetcher: MakeFetcher, *, is_left: bool = False) -> Iterator[Iteration]:
        """Yield the steps from ``first`` on. Collective.

        Args:
            phase: number of this loop among those of the run.
            make_fetcher: makes what fetches the data; gets what will probably be needed next.
            is_left: the run has left this loop before ``first``, and has saved its state behind it.
        """
        rounds, team = self._rounds, self._rounds.team
        check_begun(
            self._arithmetic.floating_point,
            threads=torch.get_num_threads(),
            num_workers=team.size,
            deterministic=self._arithmetic.deterministic,
        )
        at_begin = modes()
        rounds.lag = self.strategy.num_more
        self._phase, self._base = phase, self._course.num_steps - self.strategy.num_done(first)
        last_step = self.num_steps - 1 if is_last_checked(phase) else None
        agreement = Agreement(
            rounds,
            self._tracked,
            rehearses=self._arithmetic.deterministic and team.num_parts == 1,
            last_step=last_step,
            lag=self.strategy.num_more,
            phase=phase,
        )
        upcoming = Upcoming(
            rounds.members,
            self.cursor,
            self.num_steps,
            lambda number, plan: agreement.expected(number, self._base + number, plan),
        )
        if not self.strategy.overlaps:
            self._keeper.saver.copy_at_once()
        fetcher = make_fetcher(lambda: self.strategy.forecast(upcoming))
        self._current_folder()
        self._clock = Clock()  # to get into the run may have taken long, and is no part of the first step
        context = StepContext(
            rounds=rounds,
            folder=self._current_folder,
            fetcher=fetcher,
            cursor=self.cursor,
            seed=self.cursor.seed,
            phase=phase,
            first_number=self._base,
            note_plan=upcoming.note,
            guards=Guards(self._tracked),
            agreement=agreement,
            clock=self._clock,
            tracked=self._tracked,
            finiteness=self._course.finiteness,
            doubts=self._course.doubts,
            reduction=self._summing.reduction,
        )
        self._course.doubts.last_batch = self.cursor.single(self.num_steps) if self._planned.samples is None else None
        self.strategy.open(context, first)
        self._tell_loop(first)
        hooks = self._tracked.before_updates(self._before_update)
        self.is_open = True
        try:
            with (
                watched_clipping(self.is_in_microbatch),
                watched_zero_grad(self._unused.dropped),
                watched_schedulers(self._before_schedule),
                taken_backward(self._microbatch, self._trained, self._take_backward, self._has_no_gradient),
                shared_updates(rounds, self._tracked, self._clock),
            ):
                end = first if is_left else max(first, self.num_steps + self.strategy.num_more)
                for number in range(first, end):
                    at_step(self._base + number)
                    self._move_to(number)
                    team.in_loop((phase, self._base + number))
                    # A newcomer derives its layout from the state of this boundary; the members have the same by then.
                    self._current_folder()
                    self._keeper.collect(rounds)
                    if self._keeper.acts(rounds, may_save=self.strategy.may_save(number)):
                        self.strategy.settle()
                    self._keeper.boundary(rounds, may_save=self.strategy.may_save(number))
                    seed_at(self.cursor.seed, "step", *self._place_of(number))
                    self._course.step_begins(self._base + number, self._clock)
                    with self.apart():
                        self._planned.before_step(number, rounds)
                    for tap in rounds.taps:
                        tap.before_step(self._base + number)
                    self.step = self.strategy.make_step(number, self._unused, self._process)
                    point("step_head")
                    yield self.step
                    self._process.check("run.steps")
                    check_unchanged(at_begin, f"step {self.step.number}")
                    self._end_step(self.step)
            self._move_to(end)
            if self.step is not None:
                with self.apart():
                    self._planned.before_step(end, rounds)
            if not is_left:
                self._keeper.end_loop(rounds)
            self.step = None
            team.in_loop(None)
        finally:
            self.is_open = False
            if self.step is not None and self.step.state is StepState.NEW:
                self.step.state = StepState.FAILED
            for hook in hooks:
                hook.remove()
            self.strategy.close()
            fetcher.close()
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def leave(self) -> None:
        """End the last step, if its inner loop has begun: the script has left the loop, perhaps by ``break``. Does
        nothing the second time.

        Raises:
            StepError: the step has no gradient.
        """
        step = self.step
        if step is None or self._has_left:
            return
        self._has_left = True
        if self.is_open or step.has_begun:
            self._end_step(step)
        # A loop that was left by `break` has not reached its end, where it would have set this position.
        self._move_to(step.number_in_loop + (1 if step.has_begun else 0))

    def apart(self) -> AbstractContextManager[None]:
        """Return a context for what is done together between two steps, which is no update of the script's."""
        return self._clock.other()

    def has_gradient(self) -> bool:
        """Whether the script has got through the inner loop of its newest step."""
        return self.step is not None and self.step.is_complete

    def is_apart(self) -> bool:
        """Whether the script is where each worker is at a part of its own.

        Raises:
            StepError: the script has left the inner loop before its end.
        """
        if self.step is not None:
            self.step.check_not_left()
        return self.step is not None and self.step.is_apart

    def is_in_microbatch(self) -> bool:
        """Whether the script is within the inner loop.

        Raises:
            StepError: the script has left the inner loop before its end.
        """
        if self.step is not None:
            self.step.check_not_left()
        return self.step is not None and self.step.microbatch is not None

    # -- inside --------------------------------------------------------------------------------------

    def _end_step(self, step: Iteration) -> None:
        """Close a step that the script has finished, and tell the course of it. Once for each step."""
        if step.state in (StepState.CLOSED, StepState.FAILED):
            return
        step.close()
        point("after_step")
        seconds = self._clock.reset()
        self._clock.switch("other")
        self._course.step_ends(step, seconds, self.cursor, self.end)

    def _tell_loop(self, first: int) -> None:
        """Tell the taps which loop begins."""
        members = self._rounds.members
        loop = Loop(
            worker_id=members.worker_ids[members.rank],
            tracked=self._tracked,
            seed=self.cursor.seed,
            phase=self._phase,
            steps=range(self._base + first, self._base + self.num_steps),
            recipe=self.recipe,
            lag=self.strategy.num_more,
        )
        for tap in self._rounds.taps:
            tap.before_loop(loop)

    def _place_of(self, number: int) -> tuple[int, ...]:
        """Return what the random numbers of an iteration are derived from: no two of a run have the same."""
        if number < self.num_steps:
            return (self._base + number,)
        return (self._base + self.num_steps - 1, number)

    def _move_to(self, number: int) -> None:
        self._rounds.position = Position(
            phase=self._phase,
            step=number,
            number=self._base + number,
            total=self._course.num_steps,
            lines=self._keeper.journal.number,
        )

    def _current_folder(self) -> GradientFolder:
        """Return the folder of the parameters that are trained now. Collective if these have changed."""
        trained, buffers, extras = self._tracked.trained(), self._tracked.buffers(), self._extras()
        if self._folder is not None and self._folder.is_for(trained, buffers, extras):
            return self._folder
        if self._folder is not None:
            self._folder.close()
        frozen = []
        for name, parameter in self._tracked.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # from when the parameter was trained; an optimizer would apply it again
                if not parameter.is_meta:
                    frozen.append((name, parameter))
        self._folder = GradientFolder(
            trained,
            buffers,
            frozen,
            self._tracked.calls,
            self._rounds.slots,
            extras=extras,
            means=self._summing.reduction == "mean",
            rounds=self._summing.wire == "bf16",
            sections=self.strategy.sections(trained, buffers),
        )
        self._rounds.use_layout(self.strategy.layout(self._folder))
        return self._folder

    def _extras(self) -> list[Extra]:
        """Return what the micro-batches add up besides gradients and buffers."""
        num_leaves, leaf_size = self.cursor.microbatches, self.cursor.batch_size // self.cursor.microbatches
        carried = self._tracked.carried.items()
        return [
            *self._tracked.sums.extras(),
            *(extra for name, one in carried for extra in one.extras(name, num_leaves, leaf_size)),
        ]

    def _microbatch(self) -> Microbatch | None:
        return self.step.current if self.step is not None else None

    def _trained(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        return self._folder.trained if self._folder is not None else ()

    def _take_backward(self, loss: Tensor, scaler: Any, retain_graph: bool) -> None:
        """Do for ``loss.backward()`` what ``step.backward(loss)`` does."""
        assert self.step is not None
        self.step.backward(loss, scaler=scaler, retain_graph=retain_graph)

    def _has_no_gradient(self) -> bool:
        """Whether the newest step is complete, and nothing in it counts."""
        return self.step is not None and self.step.is_complete and not self.step.has_gradient

    def _before_update(self, name: str) -> None:
        """Raise StepError if the script calls step() of an optimizer within the inner loop."""
        if self.step is not None and self.is_in_microbatch():
            raise StepError(
                f"{name}.step() was called inside `for batch in step` (micro-batch {self.step.microbatch}), where "
                "parameters have no gradient yet: call it after that loop"
            )
        self._unused.before_update(name)

    def _before_schedule(self, scheduler: object) -> None:
        """Warn of a scheduler that is not tracked, and raise StepError if its step() is called in the inner loop."""
        optimizer = getattr(scheduler, "optimizer", None)
        if self.is_in_microbatch() and any(optimizer is tracked for tracked in self._tracked.optimizers.values()):
            raise StepError(
                "the step() of a learning rate scheduler was called inside `for batch in step`, where each worker "
                "computes different micro-batches, so it would count different steps on each worker: call it after "
                "that loop"
            )
        self._tracked.check_scheduler(scheduler)
