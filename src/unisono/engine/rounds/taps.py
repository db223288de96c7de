"""Taps: what looks on at the steps of a run, and at which moments.

A plain run has none. Who wants to look on derives a class from `Tap`, and adds an object of it to `Rounds.taps`; its
methods, in the order of a step, are the moments.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.core.cursor import Recipe
from unisono.core.events import StepResult
from unisono.core.plan import Plan
from unisono.core.rehearsals import Twice
from unisono.core.telemetry import Compared
from unisono.engine.microbatch.folding import Fingerprint
from unisono.engine.rounds import Dispute, Repeats
from unisono.engine.state.tracked import Tracked

__all__ = ["Computed", "Loop", "Place", "Tap"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a micro-batch, or of a sum, in a run."""

    step: int
    """Of the run, from 0, as in the journal; of local steps, the round."""
    turn: int = 0
    """The pass over the global batch, from 0 (``step.again``)."""
    leaf: int = -1
    """The micro-batch; -1: the place is that of a sum."""
    replica: int = -1
    """Of local steps, the replica; -1: there is none, or the place is that of the round's sum."""
    inner: int = -1
    """Of a replica, its step within the round, from 0."""
    aside: bool = False
    """The micro-batch is computed once more, to be compared; nothing of it is summed."""

    @property
    def name(self) -> str:
        """Name of the micro-batch within its step: ``micro-batch 1 of inner step 4 of replica 0``."""
        turn = f" (pass {self.turn})" if self.turn else ""
        inner = f" of inner step {self.inner} of replica {self.replica}" if self.replica >= 0 else ""
        return f"micro-batch {self.leaf}{inner}{turn}"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop that begins."""

    worker_id: str
    tracked: Tracked
    seed: int
    phase: int
    """The number of the call of ``run.steps``, from 0."""
    steps: range
    """The steps of the run that this worker does in the loop, by their numbers in the run."""
    recipe: Recipe
    """Of the loop: its data and its strategy."""
    lag: int
    """By so many steps the update of a gradient comes later than the gradient (``delay=``)."""

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next((one.device for _, one in self.tracked.parameters()), torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A micro-batch after its backward pass, for `Tap.after_microbatch`."""

    fingerprint: Fingerprint
    gradients: Mapping[str, Tensor]
    """By parameter, as they are summed: of the loss times ``factor``. Views, valid until the tap returns."""
    weight: float
    """What the micro-batch counts in the mean, e.g. its samples."""
    factor: float
    """What the gradients are multiplied by before they are summed: the weight over a power of two; 1 for sums."""
    loss: float


class Tap:
    """Looks on at the steps of one worker of a run, and changes no bit. A tap overrides the methods that it needs.

    All methods are called in the script's thread, and must leave the generators of random numbers as they are. A method
    may raise `unisono.core.errors.StopInspection`, which ends the run in words. With several workers all must raise it
    in `after_sum` of the same step, or as inspectors in `after_step`, so that none waits for another: let only its
    number decide.

    Attributes:
        settles: finds out who is wrong where members have computed different values (`settle`), and the round is done
            again. At most one tap of a run does; without one, the difference is an error.
        sound: a checkpoint of at most so many steps holds no wrong state, as far as members have compared theirs.
    """

    settles: bool = False
    sound: int = 0

    def before_loop(self, loop: Loop) -> None:
        """Receive the loop that begins. The state of the run is loaded."""

    def before_step(self, step: int) -> None:
        """Receive the number in the run of the iteration that begins, before the script gets it."""

    def twice(self, plan: Plan, step: int, turn: int, *, is_forecast: bool = False) -> Twice:
        """Return what this member computes in a pass over a global batch so that two have computed it. Local.

        Asked of the tap that settles, where the engine itself has nothing to compare.

        Args:
            plan: of the pass, in which nothing is computed yet.
            step: of the run.
            is_forecast: the step is a coming one, and the plan a likely one.
        """
        return Twice()

    def has_twice(self, step: int, turn: int) -> bool:
        """Return whether members compute anything twice in a pass that has begun; the same on all members. Local."""
        return False

    def looks_at(self, place: Place) -> bool:
        """Return whether `before_microbatch` and `after_microbatch` are to be called for a micro-batch.

        The second needs a digest of each gradient, which takes about as long as an update.
        """
        return False

    def before_microbatch(self, place: Place, batch: Any) -> None:
        """Receive a micro-batch before the script does. The generators are set as its forward pass finds them.

        Args:
            batch: None: all of its samples are left out, and the script does not get it.
        """

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        """Receive what a micro-batch has given."""

    def differ(self, said: Mapping[str, Compared]) -> bool:
        """Return whether members have computed different values, so that `settle` has to follow. Local, and the same
        on all members.

        Args:
            said: with the sum of a step, by worker, by those that have summed it.
        """
        return False

    def compare(self, said: Mapping[str, Compared], step: int, turn: int, *, is_disputed: bool) -> bool:
        """Note what members have said with a sum, when it is to count; return whether they `differ`.

        Args:
            is_disputed: it is known already that something differs.
        """
        return False

    def settle(self, round_: Repeats, dispute: Dispute) -> Generator[Any, None, None]:
        """Find out who is wrong, because members have computed different values, and go on without them. Collective.

        Yields micro-batches to the script. The round is to be done again.

        Args:
            round_: committed; its result is not in force.

        Raises:
            DivergenceError: nobody can say who is wrong. RunStopped: the run goes back.
        """
        raise AssertionError("this tap does not settle what differs")

    def agreed(self, step: int, lag: int = 0) -> None:
        """Note that all members had the same state when they began a step of the run.

        Args:
            lag: by so many steps updates come later than their gradients.
        """
        self.sound = max(0, step - lag)

    def after_sum(self, place: Place, result: StepResult) -> None:
        """Receive the result of a sum, before anything is updated.

        Called after each pass over a global batch; for a replica of local steps after each step of it, and for the
        round; with ``delay=D`` in the iteration that applies the gradient. ``result.digest`` is that of the journal
        when the pass was the last one.
        """
