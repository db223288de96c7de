"""Inspection of a run: what is told, step by step and micro-batch by micro-batch, to an `Inspector`.

A run is inspected when its settings name an inspector (`unisono.core.settings.RunSettings.inspect`). The training loop
then calls the inspector's methods; without one, a step costs one comparison with None for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.core.cursor import Recipe
from unisono.core.events import StepResult
from unisono.engine.microbatch.folding import Fingerprint
from unisono.engine.state.tracked import Tracked

__all__ = ["Computed", "InReplica", "Inspected", "Inspector", "Place"]


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
class Inspected:
    """A training loop that is inspected."""

    worker_id: str
    tracked: Tracked
    seed: int
    phase: int
    """The number of the call of ``run.steps``, from 0."""
    steps: range
    """The steps of the run that this worker does in the loop, by their numbers in the run."""
    recipe: Recipe
    """Of the loop: its data and its strategy."""

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next((one.device for _, one in self.tracked.parameters()), torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A micro-batch after its backward pass."""

    fingerprint: Fingerprint
    gradients: Mapping[str, Tensor]
    """By parameter, as they are summed: of the loss times ``factor``. Views, valid until the inspector returns."""
    weight: float
    """What the micro-batch counts in the mean, e.g. its samples."""
    factor: float
    """What the gradients are multiplied by before they are summed: the weight over a power of two; 1 for sums."""
    loss: float


class Inspector:
    """Watches the steps of one worker of a run; an inspector overrides the methods that it needs.

    All methods are called in the script's thread, and must leave the generators of random numbers as they are. A method
    may raise `unisono.core.errors.StopInspection`, which ends the run in words. With several workers all must raise it
    in `after_sum` or `after_step` of the same step, so that none waits for another: let only its number decide.
    """

    def arguments(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what ``run.steps`` is to take instead of the arguments that the script has given, for a trial.

        Args:
            given: ``microbatches``, ``batch_size``, ``wire`` and ``delay``.
        """
        return given

    def before_loop(self, loop: Inspected) -> None:
        """Receive the loop that begins. The state of the run is loaded."""

    def before_step(self, step: int) -> None:
        """Receive the number in the run of the iteration that begins, before the script gets it."""

    def looks_at(self, place: Place) -> bool:
        """Return whether `before_microbatch` and `after_microbatch` are to be called for a micro-batch.

        The second needs a digest of each gradient, which takes about as long as an update.
        """
        return False

    def before_microbatch(self, place: Place, batch: Any) -> None:
        """Receive a micro-batch before the script does. The generators are set as its forward pass finds them."""

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        """Receive what a micro-batch has given."""

    def after_sum(self, place: Place, result: StepResult) -> None:
        """Receive the result of a sum, before anything is updated.

        Called after each pass over a global batch; for a replica of local steps after each step of it, and for the
        round; with ``delay=D`` in the iteration that applies the gradient. ``result.digest`` is that of the journal
        when the pass was the last one.
        """

    def after_step(self, result: StepResult) -> None:
        """Receive the result of a step as it goes into the journal, when the script has made its update."""

    def at_end(self) -> None:
        """Note that the script has come to its end: the run has done all its steps. May raise `StopInspection`."""

    def close(self) -> None:
        """Give back what is held; the run has ended, however it did."""


class InReplica(Inspector):
    """Tells an inspector about the steps of a replica.

    Args:
        step: the round, by its number in the run.
        first: the first global batch of the round, within the loop.
        aside: the replica is another member's, and is only compared.
    """

    def __init__(self, inspector: Inspector, *, step: int, first: int, replica: int, aside: bool) -> None:
        self._inspector = inspector
        self._step = step
        self._first = first
        self._replica = replica
        self._aside = aside

    def looks_at(self, place: Place) -> bool:
        return self._inspector.looks_at(self._at(place))

    def before_microbatch(self, place: Place, batch: Any) -> None:
        self._inspector.before_microbatch(self._at(place), batch)

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        self._inspector.after_microbatch(self._at(place), computed)

    def after_sum(self, place: Place, result: StepResult) -> None:
        self._inspector.after_sum(self._at(place), result)

    def _at(self, place: Place) -> Place:
        return msgspec.structs.replace(
            place,
            step=self._step,
            replica=self._replica,
            inner=place.step - self._first,
            aside=place.aside or self._aside,
        )
