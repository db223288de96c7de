"""An evaluator: a process that computes one evaluation of a run from a snapshot, and ends.

It runs the script alone, from its beginning, as a run that is resumed does: the script skips the training loops that
are over, and in the one of the call it gets one step only, that in which the call stands. There it has the models of
the snapshot. The inner loop of that step gives no batch, and the optimizers change nothing. When the script comes to
the call of ``run.evaluate(..., wait=False)``, the evaluator computes the totals, leaves them beside the snapshot, and
ends.

If the script does not come to the call, or raises, the workers compute the totals: nothing that goes wrong here changes
a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from unisono.core.cursor import Cursor
from unisono.core.errors import StopInspection, UnisonoError, UsageError
from unisono.core.fingerprints import other_arithmetic
from unisono.engine.checkpoint.evaluations import CANNOT, REFUSED, EvaluationOrder, get_on, hand_in, order_of
from unisono.engine.checkpoint.loading import read
from unisono.engine.loop.step import Step, StepState
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.script.inspecting import Inspector
from unisono.script.loop import TrainingLoop
from unisono.script.talking import CallPlace
from unisono.strategies.delay.strategy import StepOfMore
from unisono.strategies.evaluators.requests import EvaluationRequest
from unisono.system.fingerprint import fingerprint
from unisono.system.process import Process
from unisono.system.stacks import in_one_line

__all__ = ["VisitedRound", "VisitedStep", "Visiting", "visited"]


class VisitedStep(StepOfMore):
    """A step of the run, as an evaluator sees it: it is over, and has no batch."""

    def __init__(self, cursor: Cursor, order: EvaluationOrder, num_steps: int, process: Process) -> None:
        self._cursor = cursor
        self._num_steps = num_steps
        self._process = process
        self._loss = order.loss
        self._logs = {}
        self._totals = {}
        self._passes = []
        self._round = None
        self._is_left = False
        self._known = from_bytes(order.totals) if order.totals else {}
        self._order = order
        self.state = StepState.COMPLETE

    @property
    def number(self) -> int:
        """Number within the run, from 0."""
        return self._order.step

    @property
    def number_in_loop(self) -> int:
        return self._order.number_in_loop

    @property
    def name(self) -> str:
        return f"step {self.number}"

    def sample_indices(self, microbatch: int) -> list[int]:
        """Return the samples of one of this step's micro-batches."""
        return self._cursor.indices(self.number_in_loop, microbatch)

    @property
    def loss(self) -> float:
        """The mean loss of the global batch."""
        return self._loss

    @property
    def totals(self) -> dict[str, Any]:
        """The sums of `add` over the global batch, by name."""
        return dict(self._known)

    @property
    def is_complete(self) -> bool:
        """Whether its inner loop is over."""
        return True

    @property
    def has_gradient(self) -> bool:
        """Whether the members have had a gradient to apply; without one there is no loss."""
        return not math.isnan(self._loss)

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: the members have trained on the global batch."""
        return iter(())

    def again(self, *, reseed: bool = False) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())


class VisitedRound(VisitedStep):
    """A round of local steps, as an evaluator sees it: it is over, and has no step."""

    def __init__(self, cursor: Cursor, order: EvaluationOrder, num_rounds: int, process: Process, steps: range) -> None:
        super().__init__(cursor, order, num_rounds, process)
        self.steps = steps
        self.weight = math.nan
        """An evaluator does not know it."""

    @property
    def epoch(self) -> int:
        """Passes over the data that were complete when the round began, from 0."""
        return self._cursor.position(self.steps.start).epoch

    @property
    def num_samples(self) -> int:
        """Samples of the round, of all replicas."""
        return sum(self._cursor.position(step).num_samples for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def visited(loop: TrainingLoop, order: EvaluationOrder, process: Process) -> VisitedStep:
    """Return what the script gets in the iteration of an order."""
    strategy, number = loop.strategy, order.number_in_loop
    steps = strategy.round_of(number)
    if steps is None:
        return VisitedStep(loop.cursor, order, loop.num_steps, process)
    return VisitedRound(loop.cursor, order, loop.num_steps, process, steps)


class Visiting(Inspector):
    """Has the script of a run that is inspected come to one call of ``run.evaluate(..., wait=False)``.

    Args:
        snapshot: its path, as JSON.

    Attributes:
        step: the one that the script visits; None outside of it.
    """

    def __init__(self, snapshot: str) -> None:
        self._snapshot = Path(msgspec.json.decode(snapshot, type=str))
        self._order = order_of(self._snapshot)
        self._state: dict[str, Any] = {}
        self._tracked: Tracked | None = None
        self.step: VisitedStep | None = None

    def is_at(self, phases: int) -> bool:
        """Return whether the call stands where the script is, after its visits to so many training loops."""
        step = self.step.number if self.step is not None else -1
        return (self._order.phases, self._order.step) == (phases, step)

    def visit(self, phase: int, loop: TrainingLoop, tracked: Tracked, device: torch.device) -> Iterator[Step]:
        """Yield the step of a training loop in which the call stands, if it stands in this loop.

        Raises:
            StopInspection: this process would compute other bits, or the script does not come to the call.
        """
        if not self._state:
            self._check_arithmetic(device)
            _train_nothing(tracked)
            self._tracked = tracked
            self._state = read(self._snapshot)[1]
            tracked.load_own(self._state)
        self._load(is_strict=False)
        get_on(self._snapshot)
        order = self._order
        if order.phases <= phase:
            raise self._cannot("the script is already past that place")
        if order.phases > phase + 1 or order.step < 0:
            return
        self.step = visited(loop, order, Process())
        yield self.step
        raise self._cannot("the script has not reached the call of run.evaluate in that step")

    def compute(self, place: CallPlace, call: int, request: EvaluationRequest) -> None:
        """Compute the totals if this is the call, leave them beside the snapshot, and end the script.

        Args:
            call: number of the call at its place.

        Raises:
            StopInspection: the totals are there, or could not be computed.
        """
        order, at = self._order, -1 if place.step is None else place.step
        if (place.phases, at, call) != (order.phases, order.step, order.call):
            return
        try:
            if (request.samples, request.batch_size) != (order.samples, order.batch_size):
                raise UsageError(
                    f"here run.evaluate has {request.samples} samples in batches of {request.batch_size}, but on the "
                    f"workers {order.samples} in batches of {order.batch_size}"
                )
            self._load(is_strict=True)
            totals = request.compute(None, 0, lambda batch: get_on(self._snapshot), of_snapshot=True)
        except UnisonoError as error:
            raise self._cannot(in_one_line(error)) from error
        hand_in(self._snapshot, to_bytes(totals))
        raise StopInspection

    def at_end(self) -> None:
        raise self._cannot("the script has reached its end")

    def _check_arithmetic(self, device: torch.device) -> None:
        known = files.read_manifest(self._snapshot).fingerprint
        if different := other_arithmetic(known, fingerprint(str(device))):
            raise StopInspection(
                "the arithmetic here differs from the run's, so the totals would have different bits: "
                f"{'; '.join(different)}",
                REFUSED,
            )

    def _cannot(self, why: str) -> StopInspection:
        return StopInspection(f"the evaluation of {self._order.place} cannot be computed here: {why}", CANNOT)

    def _load(self, *, is_strict: bool) -> None:
        assert self._tracked is not None
        try:
            with torch.no_grad():
                self._tracked.load_seen(self._state)
        except (UsageError, RuntimeError, KeyError):  # the script makes or changes a model before the call
            if is_strict:
                raise


def _train_nothing(tracked: Tracked) -> None:
    """Let the script's optimizers do nothing: there are no gradients, and there is nobody to update with."""

    def nothing(*given: Any, **named: Any) -> None:
        pass

    nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a scheduler warns
    for optimizer in tracked.optimizers.values():
        vars(optimizer).update(step=nothing, _opt_called=True)
    for name in ("step", "unscale_", "update"):
        setattr(torch.amp.GradScaler, name, nothing)
