"""A round of local steps as the script sees it, and how data and steps are cut for replicas."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from unisono.core.cursor import Cursor, PartOfCursor
from unisono.core.errors import StepError, UsageError
from unisono.core.events import StepResult
from unisono.core.stream_plan import StreamCursor, StreamPart, WantedSamples
from unisono.engine.loop.process_settings import check_whole
from unisono.engine.loop.step import Iteration, Step, StepState
from unisono.engine.microbatch.losses import Microbatch
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.state.sums import Total, plain
from unisono.strategies.local.replicas import ReplicaRound
from unisono.system.process import Process

__all__ = [
    "InnerStep",
    "LocalRound",
    "ReplicaSamples",
    "ReplicaStreams",
    "Replicating",
    "Replication",
    "check_count",
    "check_options",
    "samples_of",
]


def check_count(name: str, value: object) -> None:
    """Check an argument that is a number of things.

    Raises:
        UsageError: it is no whole number, or less than 1; names it.
    """
    check_whole(name, value)
    if operator.index(value) < 1:  # type: ignore[arg-type]
        raise UsageError(f"{name} must be at least 1, got {value}")


def check_options(given: Mapping[str, object], known: Collection[str]) -> None:
    """Check the names of arguments about the data.

    Raises:
        UsageError: it is one of ``run.steps`` that has no meaning here. TypeError: it is none.
    """
    if "delay" in given:
        raise UsageError(
            f"run.local_steps(delay={given['delay']!r}): local steps no longer have a delay. In version 0.2.0 delay=1 "
            "applied the mean change of a round at the end of the next one, and sent it in the meantime. Leave delay= "
            "out, and give more inner_steps=, so that the workers exchange less often; or train with "
            "run.steps(delay=1), which sends gradients while the next step is computed. Version 0.2.0 (pip install "
            "unisono==0.2.0) can resume a run that was started with delay=1"
        )
    if "wire" in given:
        raise UsageError(
            f"wire={given['wire']!r} is for run.steps, whose gradients travel in each step. In run.local_steps the "
            'changes of the replicas travel, once in a round: delta="int8" makes those smaller. Leave wire= out'
        )
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"run.local_steps() got an unexpected keyword argument {unknown[0]!r}")


@dataclass(frozen=True)
class Replication:
    """How a training is cut into rounds and replicas."""

    replicas: int
    inner_steps: int

    def __post_init__(self) -> None:
        check_count("replicas", self.replicas)
        check_count("inner_steps", self.inner_steps)

    def num_rounds(self, num_steps: int) -> int:
        return -(-num_steps // self.inner_steps)

    def steps_of(self, round_: int, num_steps: int) -> range:
        """Return the global batches of a round; the last round may have fewer."""
        return range(round_ * self.inner_steps, min((round_ + 1) * self.inner_steps, num_steps))

    def place(self, step: int, replica: int) -> int:
        """Return the place of a replica's step in the order in which one worker computes all of them."""
        round_, within = divmod(step, self.inner_steps)
        return (round_ * self.replicas + replica) * self.inner_steps + within

    def at(self, place: int) -> tuple[int, int]:
        """Return the (step, replica) at a place."""
        block, within = divmod(place, self.inner_steps)
        round_, replica = divmod(block, self.replicas)
        return round_ * self.inner_steps + within, replica


class ReplicaSamples:
    """The samples of the replicas' micro-batches, by `Replication.place`.

    Args:
        parts: the data of each replica.
    """

    def __init__(self, replication: Replication, parts: Sequence[PartOfCursor | StreamPart]) -> None:
        self._replication = replication
        self._parts = parts

    def part(self, replica: int) -> PartOfCursor | StreamPart:
        """Return the data of one replica."""
        return self._parts[replica]

    def indices(self, step: int, leaf: int) -> Sequence[int]:
        number, replica = self._replication.at(step)
        return self._parts[replica].indices(number, leaf)

    def keys(self, step: int, leaf: int) -> Sequence[tuple[int, int]]:
        number, replica = self._replication.at(step)
        return self._parts[replica].keys(number, leaf)


class ReplicaStreams(ReplicaSamples):
    """The same where the data are streams: each replica reads its own ones."""

    def __init__(self, replication: Replication, cursor: StreamCursor) -> None:
        number = replication.replicas
        self._streams = [StreamPart.of(cursor, replica, number) for replica in range(number)]
        super().__init__(replication, self._streams)
        self.microbatches = cursor.microbatches
        self.seed = cursor.seed

    def stream(self, step: int, leaf: int) -> int:
        number, replica = self._replication.at(step)
        return self._streams[replica].stream(number, leaf)

    def wanted(self, step: int, leaf: int) -> WantedSamples:
        number, replica = self._replication.at(step)
        return self._streams[replica].wanted(number, leaf)


def samples_of(cursor: Cursor, replication: Replication) -> ReplicaSamples:
    """Return the samples of the replicas' micro-batches, which share the batches of a cursor."""
    if isinstance(cursor, StreamCursor):
        return ReplicaStreams(replication, cursor)
    number = replication.replicas
    return ReplicaSamples(replication, [PartOfCursor.of(cursor, replica, number) for replica in range(number)])


class InnerStep(Step):
    """One step of one replica, within a round of local steps.

    As a step of ``run.steps``, but its global batch is the part of the replica, and its gradient is the replica's.
    """

    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **named: float | Tensor) -> None:
        """Refuse: the journal has one line for each round.

        Raises:
            StepError: always.
        """
        raise StepError(
            "step.log was called in a step of a replica, which only one worker computes: call round.log after `for "
            "step in round` (round.loss is the mean loss then, and step.add gives exact sums in round.totals)"
        )

    def _unused_error(self) -> StepError:
        return StepError(
            f"{self.name} was not iterated: run.local_steps has three loops, `for round in "
            "run.local_steps(...):`, in it `for step in round:`, and in that `for batch in step:` with loss.backward()"
        )


class Replicating(Protocol):
    """What a round asks of `unisono.strategies.local.strategy.LocalSteps`."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def scale(self) -> float:
        """A power of two that all weights are divided by."""

    def steps_of(self, number: int) -> range:
        """Return the global batches of a round."""

    def begin_round(self, now: LocalRound) -> ReplicaRound:
        """Remember the boundary from which all replicas of the round begin. Local."""

    def undo(self) -> None:
        """Go back to the boundary: the round is done again. Local."""

    def apply(self, done: ReplicaRound) -> None:
        """Make the new global model of the mean over the replicas. The same on all members."""


class LocalRound(Iteration):
    """One round of local steps. Made by ``run.local_steps``.

    Iterate over it once: it gives the steps of the replicas that this worker computes, replica after replica. Then the
    model is the new global one, on all workers, and `loss` the mean loss of all replicas' steps.
    """

    def __init__(self, strategy: Replicating, context: StepContext, number: int, process: Process) -> None:
        self._strategy = strategy
        self._context = context
        self._process = process
        self._number = number
        self.state = StepState.NEW
        self._is_left = False
        self._round: ReplicaRound | None = None
        self._inner: InnerStep | None = None
        self._logs: dict[str, float] = {}
        self._totals: dict[str, Total] = {}
        self._scalars = (math.nan, math.nan)

    # -- what the user reads -------------------------------------------------------------------------

    @property
    def number_in_loop(self) -> int:
        return self._number

    @property
    def name(self) -> str:
        return self._inner.name if self._inner is not None else f"round {self.number}"

    @property
    def steps(self) -> range:
        """The numbers of its steps: each replica makes one step with its part of each of these global batches."""
        return self._strategy.steps_of(self.number_in_loop)

    @property
    def epoch(self) -> int:
        """Passes over the data that were complete when the round began, from 0."""
        return self._context.cursor.position(self.steps.start).epoch

    @property
    def num_samples(self) -> int:
        """Samples of the round, of all replicas."""
        return sum(self._context.cursor.position(step).num_samples for step in self.steps)

    @property
    def loss(self) -> float:
        """The mean loss of all steps of all replicas, weighted as their gradients are. After ``for step in round``.
        NaN where nothing in the round counts.

        With ``reduction="sum"``, the mean over the steps of the sum over their global batches.
        """
        self.check_not_left()
        if not self.is_complete:
            raise StepError(f"round.loss of round {self.number} is known only after `for step in round`")
        return self._loss

    @property
    def _loss(self) -> float:
        weight, weighted_loss = self._scalars
        if not weight:
            return math.nan
        return weighted_loss / (weight if self._context.reduction == "mean" else len(self.steps))

    @property
    def weight(self) -> float:
        """The sum of the weights of all micro-batches. After ``for step in round``."""
        return self._scalars[0] * self._strategy.scale

    @property
    def totals(self) -> dict[str, Any]:
        """The sums of ``step.add`` over all steps of all replicas, by name. After ``for step in round``."""
        if not self.is_complete:
            raise StepError(f"round.totals of round {self.number} are known only after `for step in round`")
        return dict(self._totals)

    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **named: float | Tensor) -> None:
        """Write numbers into this round's line of the journal. Local: those of rank 0 count.

        Args:
            values: numbers, or tensors of one element, by name.
            named: the same.

        Raises:
            StepError: called within ``for step in round``, or when the round is over.
        """
        self.check_not_left()
        if self.state is StepState.INSIDE:
            raise StepError(
                "round.log was called inside `for step in round`, where each worker is at another replica: call it "
                "after that loop"
            )
        self._log(values, named)

    def __len__(self) -> int:
        """Return the number of steps that each replica makes in this round."""
        return len(self.steps)

    def __repr__(self) -> str:
        return f"<round {self.number}: {len(self)} steps of {self._strategy.num_replicas} replicas, {self.state.value}>"

    # -- the middle loop -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[InnerStep]:
        """Yield the steps of this worker's replicas; ends when the replicas are averaged. Collective."""
        self._process.check("for step in round")
        if self.state is not StepState.NEW:
            raise StepError(
                f"round {self.number} was already iterated over, or its loop is over; `for step in round` can run only "
                "once per round"
            )
        return self._run()

    def _run(self) -> Iterator[InnerStep]:
        self.state = StepState.INSIDE
        context, strategy = self._context, self._strategy
        try:
            current = yield from context.rounds.play_until_agreed(self._begin_round)
        except GeneratorExit:
            self._is_left = True
            raise
        self._scalars = current.scalars
        strategy.apply(current)
        known = context.tracked.sums
        self._totals = known.learn(current.sums())
        known.note_loss(self._loss, self._scalars[0], context.phase, self.epoch)
        known.note(known.begin_step(context.phase, self.epoch), self._totals, context.phase)
        self._complete()

    @property
    def has_gradient(self) -> bool:
        """Whether anything in the round counts. After ``for step in round``."""
        return super().has_gradient and self._scalars[0] != 0.0

    def _begin_round(self) -> ReplicaRound:
        if self._round is not None:  # it is done again
            self._round.undo()
            self._strategy.undo()
        self._round = self._strategy.begin_round(self)
        return self._round

    def enter(self, inner: InnerStep | None) -> None:
        """Note the step that the script gets."""
        self._inner = inner

    # -- for the outer loop --------------------------------------------------------------------------

    @property
    def inner(self) -> InnerStep | None:
        """The step of a replica that the script got last; None outside of ``for step in round``."""
        return self._inner

    @property
    def is_apart(self) -> bool:
        """Whether the script is where each worker is at another replica."""
        return self.state is StepState.INSIDE

    @property
    def current(self) -> Microbatch | None:
        return self._inner.current if self._inner is not None else None

    def sample_indices(self, microbatch: int) -> list[int]:
        """Return the samples of a micro-batch of the step that the script got last."""
        return self._inner.sample_indices(microbatch) if self._inner is not None else []

    def add(self, **values: float | Tensor) -> None:
        """Do what ``step.add`` does in the step that the script got last.

        Raises:
            StepError: called outside of ``for batch in step``.
        """
        if self._inner is None:
            raise StepError(
                f"step.add adds up numbers of a micro-batch: in round {self.number}, within `for batch in step`"
            )
        self._inner.add(**values)

    def backward(self, loss: Tensor, *, scaler: Any = None, retain_graph: bool = False) -> None:
        """Do what ``loss.backward()`` means in the step that the script got last."""
        assert self._inner is not None
        self._inner.backward(loss, scaler=scaler, retain_graph=retain_graph)

    @property
    def sent_bytes(self) -> int:
        result = self._round.result if self._round is not None else None
        return result.sent_bytes if result is not None else 0

    def check_not_left(self) -> None:
        """Check that the script has not left the middle loop, or one of its inner loops, before the end.

        Raises:
            StepError: the script has.
        """
        if self._inner is not None:
            self._inner.check_not_left()
        super().check_not_left()

    def _left_error(self) -> StepError:
        return StepError(
            f"the loop `for step in round` of round {self.number} was left before its end (break, return or an "
            "exception): its replicas are not averaged"
        )

    def result(self) -> StepResult:
        """Return what all members agree on about this round. After the middle loop."""
        assert self._round is not None
        return StepResult(
            step=self.number,
            epoch=self.epoch,
            loss=self._loss,
            weight=self.weight,
            samples=self.num_samples,
            digest=f"{self._round.digest:016x}",
            totals=plain(self._totals),
            losses=[],
            unit="round",
        )

    def _unused_error(self) -> StepError:
        return StepError(
            f"round {self.number} was not iterated over: write `for step in round:`, and in it `for batch in step:`"
        )
