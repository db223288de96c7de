"""A worker that follows the run to evaluate, and never trains.

An evaluator runs the script, as a worker that joins later does: it skips the training loops that are over, and in the
one that goes on it visits only the steps in which a ``run.evaluate(..., wait=False)`` is to be computed. There it has
the models of that step. The inner loop of such a step gives no batch, and the optimizers change nothing. When the
script comes to the call, the evaluator computes the totals, and sends them to the head.

If the script does not come to the call (it has asked for something that only members know, say), the evaluator reports
so, and the members compute the totals. So nothing that goes wrong here changes a result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from unisono.decisions.cursor import Cursor
from unisono.errors import RunStopped, StepError, UnisonoError, UsageError
from unisono.faults import at_step, point
from unisono.member import Member
from unisono.messages import EvaluationWanted
from unisono.process import Process
from unisono.rounds.evaluation import Totals
from unisono.rounds.handover import fetch
from unisono.secret import key_for
from unisono.stacks import in_one_line
from unisono.state.packing import from_bytes, to_bytes
from unisono.state.tracked import Tracked
from unisono.training.begun import Evaluation
from unisono.training.beside import SECRET
from unisono.training.loop import TrainingLoop
from unisono.training.requests import Request
from unisono.training.step import State, Step
from unisono.training.talking import Place

__all__ = ["Follower", "VisitedRound", "VisitedStep", "visited"]

MOST_BYTES = 1 << 20
"""Of the totals that go through the head."""


class VisitedStep(Step):
    """A step of the run, as an evaluator sees it: it is over, and has no batch."""

    def __init__(
        self, cursor: Cursor, order: EvaluationWanted, num_steps: int, process: Process, *, has_gradient: bool = True
    ) -> None:
        self._has_gradient = has_gradient
        self._cursor = cursor
        self._num_steps = num_steps  # whoever has a delay makes some more, after the last global batch
        self._position = cursor.position(order.number_in_loop)
        self._process = process
        self._loss = order.loss
        self._logs = {}
        self._totals = {}
        self._passes = []
        self._round = None
        self._is_left = False
        self._known = from_bytes(order.totals) if order.totals else {}
        self._order = order
        self.state = State.COMPLETE

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

    @property
    def index(self) -> int:
        """Of this step within its epoch, from 0."""
        last = self._num_steps - 1
        return min(self.number_in_loop, last) % self._cursor.steps_per_epoch + max(0, self.number_in_loop - last)

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete, from 0."""
        return self._cursor.position(min(self.number_in_loop, self._num_steps - 1)).epoch

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the next step begins another epoch."""
        return self.number_in_loop < self._num_steps and self.index + 1 == self._cursor.steps_per_epoch

    @property
    def num_samples(self) -> int:
        """Samples of the global batch; 0 where there is none."""
        return self._position.num_samples if self.number_in_loop < self._num_steps else 0

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
        """Whether the members have applied a gradient; False in the first D steps of ``run.steps(delay=D)``."""
        return self._has_gradient

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: the members have trained on the global batch."""
        return iter(())

    def again(self, *, reseed: bool = False) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())


class VisitedRound(VisitedStep):
    """A round of local steps, as an evaluator sees it: it is over, and has no step."""

    def __init__(
        self, cursor: Cursor, order: EvaluationWanted, num_rounds: int, process: Process, steps: range
    ) -> None:
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


def visited(loop: TrainingLoop, order: EvaluationWanted, process: Process) -> VisitedStep:
    """Return what the script gets in the iteration of an order."""
    steps = loop.round_of(order.number_in_loop)
    if steps is None:
        has_gradient = loop.applies_in(order.number_in_loop)
        return VisitedStep(loop.cursor, order, loop.num_steps, process, has_gradient=has_gradient)
    return VisitedRound(loop.cursor, order, loop.num_steps, process, steps)


class Follower:
    """This worker's part in a run, as an evaluator.

    Attributes:
        step: the one that the script visits; None outside of a training loop.
    """

    def __init__(self, member: Member, tracked: Tracked, process: Process) -> None:
        self._member = member
        self._tracked = tracked
        self._process = process
        self._order: EvaluationWanted | None = None
        self._seen: dict[str, Any] = {}
        self._is_ready = False
        self._requests: dict[tuple[int, int, int], Request] = {}  # of the place where the script has been last
        self.step: VisitedStep | None = None

    # -- the loop ------------------------------------------------------------------------------------

    def follow(self, phase: int, loop: TrainingLoop) -> Iterator[Step]:
        """Yield the steps of a training loop in which there is something to evaluate.

        Ends when there is something to evaluate after the loop.

        Raises:
            RunStopped: the run is over.
        """
        self._trains_nothing()
        if not self._is_ready:
            self._is_ready = True
            self._member.ready(phase)
        try:
            while (order := self._next(phase)) is not None:
                at_step(order.step)
                self.step = visited(loop, order, self._process)
                yield self.step
                self._give_up("the script has not come to the call of run.evaluate in that step")
        finally:
            self.step = None

    def _next(self, phase: int) -> EvaluationWanted | None:
        """Wait for something to evaluate in this loop, and get the models; None: the next is after this loop."""
        while True:
            order = self._current()
            if (request := self._requests.get(_key(order))) is not None:  # the script has just been there
                self._try(order, request)
                continue
            if (order.phases, order.step >= 0) == (phase + 1, True):
                return order
            if order.phases > phase:
                return None
            self._give_up("the script is past that place already")

    def serve(self) -> None:
        """At the end of the script: do what is still asked for at the place where it has been last.

        Returns when the run is over.
        """
        with contextlib.suppress(RunStopped):
            while True:
                order = self._current()
                if (request := self._requests.get(_key(order))) is not None:
                    self._try(order, request)
                else:
                    self._give_up("its script is at its end")

    def _current(self) -> EvaluationWanted:
        """Return what is to be evaluated next, and have its models. Blocks until there is something."""
        while self._order is None:
            self._member.waiting(True)
            try:
                order = self._member.evaluations.order()
            finally:
                self._member.waiting(False)
            self._order = order
            try:
                self._fetch(order)
            except UnisonoError as error:
                self._give_up(in_one_line(error))
        return self._order

    def _fetch(self, order: EvaluationWanted) -> None:
        """Get the models, and what has happened in the loops that this script skips."""
        self._at(order, -1)
        spec = self._member.spec
        secret = key_for(spec.token, SECRET)
        self._seen, own = fetch(order.address, order.port, secret, spec.run.timeout_s, 2)
        self._tracked.load_own(own)
        self._load(is_strict=False)

    def _load(self, *, is_strict: bool) -> None:
        try:
            with torch.no_grad():
                self._tracked.load_seen(self._seen)
        except (UsageError, RuntimeError, KeyError):  # the script makes or changes a model before the call
            if is_strict:
                raise

    def _trains_nothing(self) -> None:
        """Let the script's optimizers do nothing: there are no gradients, and there is nobody to update with."""

        def nothing(*given: Any, **named: Any) -> None:
            pass

        nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a scheduler warns
        for optimizer in self._tracked.optimizers.values():
            vars(optimizer).update(step=nothing, _opt_called=True)
        for name in ("step", "unscale_", "update"):
            setattr(torch.amp.GradScaler, name, nothing)

    # -- the call ------------------------------------------------------------------------------------

    def is_at_order(self, phases: int) -> bool:
        """Return whether there is something to evaluate between the loop that is over and the next one."""
        return self._order is not None and (self._order.phases, self._order.step) == (phases, -1)

    def evaluate(self, place: Place, call: int, request: Request, num_steps: int) -> Evaluation | None:
        """Compute the totals of a call, if this evaluator has the order for it; None: it has not.

        Args:
            call: number of the call at its place.
        """
        where = (place.phases, -1 if place.step is None else place.step)
        self._requests = {key: known for key, known in self._requests.items() if key[:2] == where}
        self._requests[*where, call] = request
        order = self._order
        if order is None or _key(order) != (*where, call):
            return None
        totals = self._try(order, request)
        if totals is None:
            return self.unknown(num_steps)
        return Evaluation(num_steps, lambda: totals, lambda: True)

    def _try(self, order: EvaluationWanted, request: Request) -> Totals | None:
        """Compute the totals, and report them; None: that they could not be computed."""
        try:
            return self._compute(order, request)
        except UnisonoError as error:
            self._give_up(in_one_line(error))
            return None

    def unknown(self, num_steps: int) -> Evaluation:
        """Return a handle whose totals an evaluator does not know."""
        return Evaluation(num_steps, self._unknown, lambda: False)

    def _compute(self, order: EvaluationWanted, request: Request) -> Totals:
        if (request.samples, request.batch_size) != (order.samples, order.batch_size):
            raise UsageError(
                f"here run.evaluate has {request.samples} samples in batches of {request.batch_size}, and on the "
                f"members {order.samples} in batches of {order.batch_size}"
            )
        self._load(is_strict=True)

        def at(batch: int) -> None:
            self._at(order, batch)
            point("evaluation.batch", batch)

        totals = request.compute(None, 0, at)
        data = to_bytes(totals)
        if len(data) > MOST_BYTES:
            raise UsageError(
                f"the totals have {len(data):,} bytes, and go through the head, which takes {MOST_BYTES:,}"
            )
        self._member.evaluated(order.number, data)
        self._is_over(order)
        return totals

    def _unknown(self) -> Totals:
        raise StepError(
            "an evaluator knows the results of its own evaluations only: ask for results by `for evaluation in "
            "run.pending`, which gives none on an evaluator"
        )

    def _give_up(self, why: str) -> None:
        """Report that the order in hand cannot be done."""
        order = self._order
        if order is not None:
            self._member.evaluated(order.number, error=why)
            self._is_over(order)

    def _is_over(self, order: EvaluationWanted) -> None:
        self._member.evaluations.dealt_with(order.number)
        self._order = None
        self._seen = {}

    def _at(self, order: EvaluationWanted, batch: int) -> None:
        self._member.at(phase=order.phases - 1, step=order.step, microbatch=batch, evaluates=True)


def _key(order: EvaluationWanted) -> tuple[int, int, int]:
    """Return the call that an order is for: loops that had begun, step of the run or -1, number at that place."""
    return order.phases, order.step, order.call
