"""One step as the user sees it: the inner loop, ``backward``, ``loss`` and ``log``."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from unisono.decisions.cursor import StepPosition
from unisono.errors import StepError
from unisono.events import StepResult
from unisono.microbatch.guards import UnusedGradients
from unisono.microbatch.losses import Microbatch
from unisono.process import Process
from unisono.rounds.gradient import GradientRound, StepContext

__all__ = ["State", "Step"]


class State(enum.Enum):
    """Progress of a step."""

    NEW = "its inner loop has not begun"
    INSIDE = "its inner loop is under way, or was left before its end"
    COMPLETE = "it has its gradient"
    CLOSED = "the outer loop has gone on"
    FAILED = "it was left without a gradient"


class Step:
    """One optimizer update on one global batch. Made by ``run.steps``.

    Iterate over it once, calling `backward` for every micro-batch; then ``.grad`` of every parameter is the mean
    gradient of the global batch, equal on all workers, and `loss` the mean loss. Breaking out of the inner
    loop leaves the step without a gradient and raises `StepError`.
    """

    def __init__(self, context: StepContext, number: int, *, unused: UnusedGradients, process: Process) -> None:
        self._context = context
        self._position: StepPosition = context.cursor.position(number)
        self._unused = unused
        self._process = process
        self.place = context.first_number + number
        """Of this step within the run, from 0: of all calls of ``run.steps``."""
        self.state = State.NEW
        self._has_begun = False
        self._is_left = False
        self._round: GradientRound | None = None
        self._logs: dict[str, float] = {}

    # -- what the user reads -------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of this step within ``run.steps``, from 0."""
        return self._position.number

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete, from 0."""
        return self._position.epoch

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the next step begins another epoch."""
        return (self.number + 1) % self._context.cursor.steps_per_epoch == 0

    @property
    def num_samples(self) -> int:
        """Samples of this global batch; fewer in an epoch's last one."""
        return self._position.num_samples

    @property
    def loss(self) -> float:
        """The mean loss of the global batch: sum of weight * loss over sum of weights. After the inner loop."""
        self.check_not_left()
        if not self.is_complete:
            raise StepError(f"step.loss of step {self.number} is known after the inner loop `for ... in step`")
        return self.round.loss

    @property
    def microbatch(self) -> int | None:
        """The micro-batch that is being loaded or computed; None outside of one."""
        return self.current.leaf if self.current is not None else None

    @property
    def current(self) -> Microbatch | None:
        """The micro-batch that is being loaded or computed, or in which the inner loop was left."""
        return self._round.microbatch if self._round is not None else None

    def sample_indices(self, microbatch: int) -> list[int]:
        """Return the samples of one of this step's micro-batches."""
        return self._context.cursor.indices(self.number, microbatch)

    def log(self, **values: float | Tensor) -> None:
        """Write numbers into this step's line of the journal (those of rank 0 count).

        Raises:
            StepError: called within the inner loop.
        """
        self.check_not_left()
        if self.microbatch is not None:
            raise StepError(
                "step.log was called inside of `for batch in step`, where each worker is at another micro-batch: call "
                "it after that loop (step.loss is the mean loss then; run.evaluate gives exact totals)"
            )
        self._logs.update({name: float(v.detach() if isinstance(v, Tensor) else v) for name, v in values.items()})

    @property
    def logs(self) -> dict[str, float]:
        """The numbers that `log` was given."""
        return dict(self._logs)

    # -- the inner loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of this worker; ends when the step's gradient is complete. Collective."""
        self._process.check("for batch in step")
        if self.state is not State.NEW:
            raise StepError(f"step {self.number} was iterated before; `for ... in step` can be run once for each step")
        return self._run()

    def _run(self) -> Iterator[Any]:
        self.state, self._has_begun = State.INSIDE, True
        self._unused.start_step()  # not earlier: user code may freeze and unfreeze parameters before the inner loop
        self._round = GradientRound(self._context, self._position, self._context.folder())
        try:
            yield from self._context.rounds.play(self._round)
        except GeneratorExit:
            self._is_left = True
            raise
        self._unused.finish_step(self.number)
        self.state = State.COMPLETE

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, *, scaler: Any = None, retain_graph: bool = False
    ) -> None:
        """Add a micro-batch's gradient to that of the step.

        Args:
            loss: () the **mean** loss of this micro-batch.
            weight: what the mean is over: samples (the default), tokens ... The step's gradient is
                ``sum(weight * gradient) / sum(weight)`` over all micro-batches of all workers. A micro-batch with
                weight 0 does not count. When a micro-batch calls this several times, all calls need the same weight.
                It is rounded to the loss's dtype: for exact weights, give a loss in float32.
            scaler: a tracked ``torch.amp.GradScaler`` whose scale the gradients shall have; the loss is recorded
                without it.
            retain_graph: keep the graph for another loss of this micro-batch that shares a part of it.

        Raises:
            LossError: the loss is not a scalar, needs no gradient, or is not finite; or the weight makes no sense.
            StepError: called outside of the inner loop.
        """
        self._process.check("step.backward")
        if (current := self.current) is None:
            raise StepError(
                f"step.backward was called outside of the inner loop `for ... in step` of step {self.number}"
            )
        current.backward(loss, weight, scaler, retain_graph=retain_graph)

    # -- for the outer loop --------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether its inner loop was entered."""
        return self._has_begun

    @property
    def is_complete(self) -> bool:
        """Whether its inner loop has come to its end: it has its gradient."""
        return self.state in (State.COMPLETE, State.CLOSED)

    @property
    def round(self) -> GradientRound:
        """The round that has summed this step's gradient. After the inner loop."""
        assert self._round is not None
        return self._round

    def check_not_left(self) -> None:
        """Check that the script has not left the inner loop before its end.

        Raises:
            StepError: the script has, and goes on as if the step had its gradient.
        """
        if self._is_left:
            raise self._left_error()

    def _left_error(self) -> StepError:
        return StepError(
            f"the inner loop of step {self.number} was left before its end (break, return or an exception): "
            f"the step has no gradient. "
            "To leave out a micro-batch, call step.backward(loss, weight=0) and go on"
        )

    def result(self) -> StepResult:
        """Return what all members agree on about this step. After the inner loop."""
        summed = self.round.result
        assert summed is not None
        return StepResult(
            step=self.place,
            epoch=self.epoch,
            loss=self.loss,
            weight=self.round.weight,
            samples=self.num_samples,
            digest=f"{summed.digest:016x}",
        )

    def close(self) -> None:
        """Close the step: the outer loop goes on.

        Raises:
            StepError: the step has no gradient.
        """
        state, self.state = self.state, State.CLOSED if self.state is State.COMPLETE else State.FAILED
        if state is State.NEW:
            raise StepError(
                f"step {self.number} was not iterated: write `for batch in step:` with step.backward(loss) in it"
            )
        if state is State.INSIDE:
            raise self._left_error()
        self.round.release()
