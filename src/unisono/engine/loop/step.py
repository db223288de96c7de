"""One step as the user sees it: the inner loop, ``backward``, ``loss`` and ``log``."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from unisono.core.cursor import StepPosition, seed_of
from unisono.core.errors import StepError, UsageError
from unisono.core.events import StepResult
from unisono.core.telemetry import StepTelemetry
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.microbatch.losses import Microbatch
from unisono.engine.rounds.gradient import GradientRound, Pass, StepContext
from unisono.engine.rounds.members import Summed
from unisono.engine.rounds.taps import Place
from unisono.engine.state.sums import Total, plain
from unisono.system.process import Process

__all__ = ["CommonRound", "Iteration", "Step", "StepState", "Steps", "called_with", "loss_and_weight", "numbers"]


class StepState(enum.Enum):
    """Progress of a step."""

    NEW = "its inner loop has not begun"
    INSIDE = "its inner loop is under way, or was left before its end"
    COMPLETE = "it has its gradient"
    CLOSED = "the outer loop has moved on"
    FAILED = "it was left without a gradient"


class CommonRound(Protocol):
    """What an iteration asks of the round that it plays."""

    result: Summed | None
    """None before the commit."""
    news: str
    """Why the plan differs from the one before; "" where it does not."""

    @property
    def num_computed(self) -> int:
        """Micro-batches that this member has computed."""


class Iteration(ABC):
    """What the script gets in one iteration of a training loop: `Step`, or what a strategy has instead.

    It plays a round while the script iterates over it.
    """

    state: StepState
    _context: StepContext
    _round: CommonRound | None
    _is_left: bool
    _logs: dict[str, float]

    @property
    def number(self) -> int:
        """Number within the run, from 0, over all calls of ``run.steps``: that of the journal, of messages and of
        ``unisono replay``. It counts on in a worker that has joined later.
        """
        return self._context.first_number + self.number_in_loop

    @property
    @abstractmethod
    def number_in_loop(self) -> int:
        """Number within its call of ``run.steps`` or ``run.local_steps``, from 0."""

    @property
    def name(self) -> str:
        """What is computed, as messages name it."""
        return self._context.name(self.number_in_loop)

    @property
    def has_begun(self) -> bool:
        """Whether its inner loop was entered."""
        return self._round is not None

    @property
    def is_complete(self) -> bool:
        """Whether its inner loop has come to its end."""
        return self.state in (StepState.COMPLETE, StepState.CLOSED)

    @property
    def has_no_microbatch(self) -> bool:
        """Whether its inner loop is complete, and this worker has computed nothing in it."""
        return self.is_complete and self._played.num_computed == 0

    @property
    def _played(self) -> CommonRound:
        """The newest round that it has played. After the inner loop."""
        assert self._round is not None
        return self._round

    @property
    @abstractmethod
    def current(self) -> Microbatch | None:
        """The micro-batch that is being loaded or computed, or in which the inner loop was left."""

    @property
    def microbatch(self) -> int | None:
        """The micro-batch that is being loaded or computed; None outside of one."""
        return self.current.leaf if self.current is not None else None

    @property
    @abstractmethod
    def is_apart(self) -> bool:
        """Whether each worker is elsewhere: within a loop of the script that each runs over its own part."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """The mean loss. After the inner loop."""

    @property
    @abstractmethod
    def totals(self) -> dict[str, Any]:
        """The sums of `add`, by name. After the inner loop."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Data that this worker has sent to other hosts."""

    @abstractmethod
    def sample_indices(self, microbatch: int) -> list[int]:
        """Return the samples of a micro-batch."""

    @abstractmethod
    def add(self, **values: float | Tensor) -> None:
        """Add numbers of the current micro-batch to sums over all of them."""

    @abstractmethod
    def backward(self, loss: Tensor, *, scaler: Any = None, retain_graph: bool = False) -> None:
        """Do what ``loss.backward()`` means in the current micro-batch."""

    @property
    def has_result(self) -> bool:
        """Whether all members agree on something about it. After the inner loop."""
        return True

    @property
    def has_gradient(self) -> bool:
        """Whether it has a gradient to apply. After the inner loop."""
        return self.is_complete and self.has_result

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse: it is no batch.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self!r} is not a batch, and has no item {index!r}: the micro-batches of a step are what `for batch in "
            "step:` gives"
        )

    @property
    def telemetry(self) -> Mapping[str, StepTelemetry]:
        """What the members have said with the sum, by worker id. After the inner loop."""
        assert self._played.result is not None
        return self._played.result.telemetry

    @property
    def news(self) -> str:
        """Why the plan differs from the one before; "" where it does not. After the inner loop."""
        return self._played.news

    @property
    def logs(self) -> dict[str, float]:
        """The numbers that ``log`` was given."""
        return dict(self._logs)

    def _log(self, values: Mapping[str, float | Tensor] | None, named: Mapping[str, float | Tensor]) -> None:
        """Note numbers for the line of the journal.

        Raises:
            StepError: that line is written.
        """
        if self.state in (StepState.CLOSED, StepState.FAILED):
            raise StepError(
                f"step.log of step {self.number} was called after that step was over, when its journal line was "
                "already written: call it within run.steps, or call run.log after the training loop"
            )
        self._logs |= numbers(values, named, "step.log")

    def check_not_left(self) -> None:
        """Check that the script has not left the inner loop before its end.

        Raises:
            StepError: the script has, and goes on as if all were there.
        """
        if self._is_left:
            raise self._left_error()

    def _complete(self, turn: int = 0) -> None:
        """Note that the inner loop has come to its end, and tell the taps the result, if there is one.

        Args:
            turn: the pass that has ended.
        """
        self.state = StepState.COMPLETE
        if (taps := self._context.rounds.taps) and self.has_result:
            result = self.result()
            for tap in taps:
                tap.after_sum(Place(step=result.step, turn=turn), result)

    @abstractmethod
    def result(self) -> StepResult:
        """Return what all members agree on about it. After the inner loop."""

    def close(self) -> None:
        """Close it: the outer loop goes on.

        Raises:
            StepError: the inner loop has not come to its end.
        """
        state, self.state = self.state, StepState.CLOSED if self.state is StepState.COMPLETE else StepState.FAILED
        if state is StepState.NEW:
            raise self._unused_error()
        if state is StepState.INSIDE:
            raise self._left_error()

    @abstractmethod
    def _left_error(self) -> StepError:
        """Return the error for a script that has left the inner loop before its end."""

    @abstractmethod
    def _unused_error(self) -> StepError:
        """Return the error for a script that has not iterated over it."""


def called_with(loss_of: Callable[..., Any], batch: Any) -> Any:
    """Return what the function of `Step.compute` returns for a micro-batch."""
    return loss_of(*batch) if isinstance(batch, (tuple, list)) else loss_of(batch)


def loss_and_weight(found: Any) -> tuple[Any, float | Tensor | None]:
    """Return the loss and the weight that the function of `Step.compute` has returned."""
    if isinstance(found, tuple) and len(found) == 2:
        return found
    return found, None


def numbers(
    values: Mapping[str, float | Tensor] | None, named: Mapping[str, float | Tensor], what: str
) -> dict[str, float]:
    """Return what a script logs, by name.

    Raises:
        UsageError: it is no mapping, or a value is no number.
    """
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f'{what} takes numbers by name, e.g. {{"val/rmse": 0.31}}; got a {type(values).__qualname__}')
    found = {}
    for name, value in {**(values or {}), **named}.items():
        try:
            found[str(name)] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"{what} takes numbers, or tensors of one element; {name!r} is a {type(value).__qualname__}"
            ) from None
    return found


class Step(Iteration):
    """One optimizer update on one global batch. Made by ``run.steps``.

    Iterate over it once, calling ``loss.backward()`` or `backward` for every micro-batch; then ``.grad`` of every
    parameter is the mean gradient of the global batch, equal on all workers, and `loss` the mean loss. `again` gives
    further passes over the same global batch. Breaking out of the inner loop leaves the step without a gradient and
    raises `StepError`.
    """

    def __init__(self, context: StepContext, number: int, *, unused: UnusedGradients, process: Process) -> None:
        self._context = context
        self._position: StepPosition = context.cursor.position(number)
        self._unused = unused
        self._process = process
        self.state = StepState.NEW
        self._is_left = False
        self._round: GradientRound | None = None
        self._passes: list[GradientRound] = []  # complete ones
        self._totals: dict[str, Total] = {}
        self._totals_before: dict[str, Total] = {}  # of the epoch, without this step
        self._logs: dict[str, float] = {}

    # -- what the user reads -------------------------------------------------------------------------

    @property
    def number_in_loop(self) -> int:
        return self._position.number

    @property
    def index(self) -> int:
        """Of this step within its epoch, from 0: what ``enumerate(loader)`` would give."""
        return self.number_in_loop % self._context.cursor.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete, from 0."""
        return self._position.epoch

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the next step begins another epoch."""
        return self.index + 1 == self._context.cursor.steps_per_epoch

    @property
    def num_samples(self) -> int:
        """Samples of this global batch; fewer in an epoch's last one."""
        return self._position.num_samples

    @property
    def loss(self) -> float:
        """The mean loss of the global batch: sum of weight * loss over sum of weights. After the inner loop.

        With ``run.steps(reduction="sum")``, the sum of the losses. After `again`, that of the newest pass. NaN where
        the step has no gradient (`has_gradient`). Local, and equal on all workers.

        Raises:
            StepError: the inner loop is not over.
        """
        self.check_not_left()
        if not self.is_complete:
            raise StepError(f"step.loss of {self.name} is known only after the inner loop `for ... in step`")
        return self.round.loss if self._passes else math.nan

    @property
    def round(self) -> GradientRound:
        """The newest complete pass, whose gradient ``.grad`` is."""
        return self._passes[-1]

    @property
    def totals(self) -> dict[str, Any]:
        """The sums of `add` over the global batch, by name. After the inner loop.

        Of a name that several passes have added, the sum of the newest one. Local, and equal on all workers.

        Raises:
            StepError: the inner loop is not over.
        """
        if not self.is_complete:
            raise StepError(f"step.totals of {self.name} are known only after the inner loop `for ... in step`")
        return dict(self._totals)

    @property
    def has_gradient(self) -> bool:
        """Whether ``.grad`` has a gradient to apply. After the inner loop; False where all micro-batches have weight 0,
        and in the first D steps of ``run.steps(delay=D)``: every ``.grad`` is None, and ``optimizer.step()`` (also that
        of a ``GradScaler``) changes nothing.
        """
        return super().has_gradient and self.round.has_gradient

    @property
    def has_result(self) -> bool:
        return bool(self._passes)

    @property
    def current(self) -> Microbatch | None:
        return self._computing.microbatch if self._computing is not None else None

    @property
    def _computing(self) -> GradientRound | None:
        """The round whose micro-batches the script gets."""
        return self._round

    @property
    def indices(self) -> Tensor:
        """(n,) int64: the samples of the current micro-batch, by their index in the dataset. Within the inner loop."""
        if self.microbatch is None:
            raise StepError(
                "step.indices names the samples of the current micro-batch: use it inside `for ... in step`"
            )
        return torch.tensor(self.sample_indices(self.microbatch), dtype=torch.int64)

    def sample_indices(self, microbatch: int) -> list[int]:
        """Return the samples of one of this step's micro-batches."""
        return self._context.cursor.indices(self.number_in_loop, microbatch)

    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **named: float | Tensor) -> None:
        """Write numbers into this step's line of the journal. Local: those of rank 0 count.

        Args:
            values: numbers, or tensors of one element, by name; for names with a "/", say.
            named: the same.

        Raises:
            StepError: called within the inner loop, or when the step is over.
        """
        self.check_not_left()
        if self.microbatch is not None:
            raise StepError(
                "step.log was called inside `for batch in step`, where each worker is at another micro-batch: call it "
                "after that loop (step.loss is the mean loss then, and step.add gives exact sums)"
            )
        self._log(values, named)

    def __repr__(self) -> str:
        return f"<{self.name}: epoch {self.epoch}, {self.num_samples} samples, {self.state.value}>"

    # -- the inner loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of this worker; ends when the step's gradient is complete. Collective."""
        self._process.check("for batch in step")
        if self.state is StepState.FAILED:
            raise StepError(
                f"the loop of {self.name} is over. To take its steps one by one, keep the iterator: "
                "`steps = run.steps(...)`, `step = next(steps)`"
            )
        if self.state is not StepState.NEW:
            raise StepError(
                f"{self.name} was already iterated over; `for ... in step` can run only once per step. For another "
                "pass over the same global batch: `for ... in step.again()`"
            )
        return self._run()

    def again(self, *, reseed: bool = False) -> Iterator[Any]:
        """Yield the micro-batches of another pass over the same global batch. Collective.

        The samples are the same, augmented in the same way, and so are the random numbers. The pass has its own
        gradients, `loss` and `totals`, and begins from empty gradients; losses of workers are survived as in the first
        pass. For two models with two optimizers (a GAN), for optimizers that evaluate the loss more than once (SAM,
        LBFGS with its closure)::

            for images, _ in step:
                discriminator_loss(images).backward()
            optimizer_d.step()
            for images, _ in step.again():
                generator_loss(images).backward()
            optimizer_g.step()

        If ``for ... in step`` has not run yet, this is the first pass. One that computes no loss (features of the whole
        batch, say) calls ``step.backward(None, weight=0)``.

        Args:
            reseed: draw other random numbers than in the first pass.

        Raises:
            StepError: called within the inner loop, or after the step.
        """
        self._process.check("step.again")
        if self.state is StepState.NEW:
            return self._run()
        if self.state is not StepState.COMPLETE:
            raise StepError(
                f"step.again of {self.name} can start another pass only when the one before is complete, but "
                f"{self.state.value}"
            )
        return self._run(reseed=reseed)

    def _run(self, *, reseed: bool = False) -> Iterator[Any]:
        if self.state not in (StepState.NEW, StepState.COMPLETE):
            raise StepError(
                f"a pass over {self.name} cannot begin: {self.state.value}. The passes of a step follow each "
                "other, each in a `for` loop of its own"
            )
        self.state, turn = StepState.INSIDE, Pass(len(self._passes), reseed and bool(self._passes))
        if turn.number == 0:
            self._unused.start_step()  # not earlier: user code may freeze and unfreeze parameters before the inner loop
        context = self._context
        try:
            current = yield from context.rounds.play_until_agreed(lambda: self._begin_round(turn))
            yield from current.find_not_finite()
            sums = current.sums()
            for more in [sums, *current.more()] if sums is not None else current.more():
                yield from context.rounds.play(more)
        except GeneratorExit:
            self._is_left = True
            raise
        current.apply(sums.totals if sums is not None else None)
        self._take(current)
        self._complete(turn.number)

    def _take(self, current: GradientRound) -> None:
        """Note a round whose gradient is applied now."""
        known, phase, epoch = self._context.tracked.sums, self._context.phase, current.position.epoch
        if not any(each.has_gradient for each in self._passes):
            known.note_loss(current.loss, current.mean_weight, phase, epoch)
        if not self._passes:
            self._totals_before = known.begin_step(phase, epoch)
        self._passes.append(current)
        self._totals = {**known.zeros(), **self._totals, **current.totals}
        known.note(self._totals_before, self._totals, phase)
        if current.has_gradient:
            self._unused.finish_step(self.name)

    def _begin_round(self, turn: Pass) -> GradientRound:
        self._round = self._make_round(turn)
        # Not earlier: a parameter whose .grad is set counts as one who holds it.
        self._context.rounds.members.release_results()
        return self._round

    def _make_round(self, turn: Pass) -> GradientRound:
        return GradientRound(self._context, self._position, self._context.folder(), turn)

    def compute(self, loss_of: Callable[..., Any], *, reseed: bool = False) -> None:
        """Compute all micro-batches of this worker by a function: the inner loop, in one call. Collective.

        ::

            step.compute(lambda images, labels: F.cross_entropy(model(images), labels))

        does what ``for images, labels in step: F.cross_entropy(model(images), labels).backward()`` does. A model in
        stages (`unisono.Stages`) is trained by it only. A second call is another pass over the global batch (`again`).

        Args:
            loss_of: gets a micro-batch, a tuple or list as its arguments; returns the loss as `backward` takes it, or
                (loss, weight). It may call `add`.
            reseed: as of `again`.

        Raises:
            LossError, StepError: as `backward`.
        """
        for batch in self if self.state is StepState.NEW else self.again(reseed=reseed):
            self.backward(*loss_and_weight(called_with(loss_of, batch)))

    def add(self, **values: float | Tensor) -> None:
        """Add numbers of the current micro-batch to sums over the global batch.

        ::

            step.add(right=(logits.argmax(1) == labels).sum(), seen=len(labels))

        After the inner loop `totals` has the sums, equal on all workers and at any number of them, also on a worker
        that had no micro-batch; ``run.totals`` has them over the epoch. Integers and flags are summed as int64, other
        numbers in float64. Several calls in a micro-batch add up.

        Args:
            values: numbers, or tensors of any shape; of one name always the same shape.

        Raises:
            StepError: called outside of the inner loop. UsageError: a value is no number.
        """
        current = self._computing
        if current is None or current.microbatch is None:
            raise StepError(
                f"step.add was called outside of the inner loop `for ... in step` of {self.name}, where all workers "
                "would add the same value; what is known there needs no sum"
            )
        current.add(values)

    def backward(
        self,
        loss: Tensor | None,
        weight: float | Tensor | None = None,
        *,
        scaler: Any = None,
        retain_graph: bool = False,
    ) -> None:
        """Add a micro-batch's gradient to that of the step.

        Args:
            loss: () the **mean** loss of this micro-batch.
            weight: what the mean is over: samples (the default), tokens ... The step's gradient is
                ``sum(weight * gradient) / sum(weight)`` over all micro-batches of all workers. When a micro-batch calls
                this several times, all calls need the same weight. It is rounded to the loss's dtype: for exact
                weights, give a loss in float32. A micro-batch with weight 0 does not count, and its loss may be
                anything: not finite, without a graph, or None where there is none. A step or pass in which nothing
                counts has no gradient (`has_gradient`).
            scaler: a tracked ``torch.amp.GradScaler`` whose scale the gradients shall have; the loss is recorded
                without it.
            retain_graph: keep the graph for another loss of this micro-batch that shares a part of it.

        Raises:
            LossError: the loss is not a scalar, needs no gradient, or is not finite; or the weight makes no sense. What
                lies on an accelerator is looked at when the inner loop ends, which raises then.
            StepError: called outside of the inner loop.
        """
        self._process.check("step.backward")
        if (current := self.current) is None:
            raise StepError(f"step.backward was called outside of the inner loop `for ... in step` of {self.name}")
        current.backward(loss, weight, scaler, retain_graph=retain_graph)

    # -- for the outer loop --------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        return self.microbatch is not None

    def _left_error(self) -> StepError:
        return StepError(
            f"the inner loop of {self.name} was left before its end (break, return or an exception): the step has no "
            "gradient. To leave out a micro-batch, call step.backward(None, weight=0) and continue"
        )

    @property
    def sent_bytes(self) -> int:
        return sum(each.result.sent_bytes for each in self._passes if each.result is not None)

    def result(self) -> StepResult:
        """Return what all members agree on about this step. After the inner loop."""
        digests = [_digest(each) for each in self._passes]
        first = next((each for each in self._passes if each.has_gradient), self._passes[0])
        return StepResult(
            step=first.number,
            epoch=first.position.epoch,
            loss=first.loss,
            weight=first.weight,
            samples=first.position.num_samples,
            digest=f"{digests[0] if len(digests) == 1 else seed_of(0, *digests):016x}",
            totals=plain(self._totals),
            losses=[each.loss for each in self._passes] if len(self._passes) > 1 else [],
        )

    def _unused_error(self) -> StepError:
        return StepError(
            f"{self.name} was not iterated over: write `for batch in step:` with step.backward(loss) in it"
        )


def _digest(round_: GradientRound) -> int:
    assert round_.result is not None
    return round_.result.digest


S = TypeVar("S", bound=Iteration, covariant=True)


class Steps(Iterator[S]):
    """An iterator over the steps of one call of ``run.steps``, or over the rounds of ``run.local_steps``. Its length is
    the number of these, also of those that a worker that joins later, or a run that is resumed, has not to do again.
    """

    def __init__(self, generator: Generator[S, None, None], num_steps: int) -> None:
        self._generator = generator
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Steps[S]:
        return self

    def __next__(self) -> S:
        return next(self._generator)

    def close(self) -> None:
        """Leave the loop, as ``break`` does for a generator."""
        self._generator.close()
