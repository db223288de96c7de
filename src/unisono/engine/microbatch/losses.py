"""One micro-batch as the script computes it: its losses and their weight, and the checks of both."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.cluster.worker import member as members
from unisono.core.errors import LossError, StepError
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.graphs import divided_by, is_sum
from unisono.system.stacks import level_outside

__all__ = ["Microbatch", "Reduction"]

Reduction = Literal["mean", "sum"]
"""What the losses are, over the samples of a micro-batch."""


class Microbatch:
    """One micro-batch, from its loading until its gradient is folded.

    Args:
        step: its step, as messages name it.
        num_samples: the weight of a loss that gives none.
        samples: returns the indices of its samples, for errors.
        scale: a power of two that all weights are divided by.
        reduction: "sum": the gradients are those of the losses as they are, and a weight is for buffers only.

    Attributes:
        weight: of all its losses, scaled; 0 if it does not count.
        weighted_loss: sum of weight * loss over its losses; of the losses, where they are sums.
        is_in_backward: whether gradients are being computed.
        has_foreign: whether the script has computed gradients that reach no trained parameter.
        is_scaled: whether its gradients have the scale of a ``GradScaler``.
    """

    def __init__(
        self,
        folder: GradientFolder,
        step: str,
        leaf: int,
        *,
        num_samples: int,
        samples: Callable[[], Sequence[int]],
        scale: float,
        reduction: Reduction = "mean",
    ) -> None:
        self.leaf = leaf
        self.where = f"{step}, micro-batch {leaf}"
        self.weight = self.weighted_loss = 0.0
        self.is_in_backward = self.has_foreign = self.is_scaled = False
        self._reduction = reduction
        self._folder = folder
        self._step = step
        self._num_samples = num_samples
        self._samples = samples
        self._scale = scale
        self._first_weight: float | None = None  # the scaled weight that its first loss has asked for

    def backward(self, loss: Tensor, weight: float | Tensor | None, scaler: Any, *, retain_graph: bool) -> None:
        """Compute the gradients of a loss and fold them; see `unisono.Step.backward`."""
        value = _checked(loss, self.where)
        share = _checked_weight(weight, self._num_samples, self.where) / self._scale
        if self._first_weight is not None and share != self._first_weight:
            raise LossError(
                f"{self.where}: the losses of one micro-batch have weights {self._first_weight * self._scale:g} and "
                f"{share * self._scale:g}; "
                "one division by the total weight cannot serve both: give them the same weight and scale the "
                "loss itself"
            )
        self._first_weight = share
        if share == 0.0:
            self.weight = 0.0
            return
        if not math.isfinite(value):
            raise LossError(
                f"the loss of {self.where} is {value} (samples {self._samples()}); nothing was updated"
                f"{_replay_advice()}",
                microbatch=self.leaf,
            )
        self._look(loss)
        # The weight as the loss's own dtype can express it, so that sum and total agree.
        rounded = float(torch.tensor(share, dtype=loss.dtype)) if self._reduction == "mean" else share
        if not math.isfinite(rounded):
            raise LossError(
                f"{self.where}: the weight {share * self._scale:g} is too large for a loss of {loss.dtype}; "
                "give the loss in float32: step.backward(loss.float(), ...)"
            )
        factor = rounded if self._reduction == "mean" else 1.0
        self.weight = rounded
        self.weighted_loss += factor * value
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        self.is_scaled |= scale != 1.0
        self.is_in_backward = True
        try:
            self._folder.backward(loss, factor * scale, retain_graph=retain_graph)
        finally:
            self.is_in_backward = False

    def _look(self, loss: Tensor) -> None:
        """Warn of a loss that is probably not what the step takes it for. Looks at a run's first micro-batch only."""
        member = members.current()
        if not self._folder.is_new or (member is not None and member.worker_id != "w0"):  # once for all workers
            return
        if (number := divided_by(loss)) is not None:
            warnings.warn(
                f"the loss of {self.where} is a mean divided by {number}. If the division is for gradient "
                "accumulation, remove it: a step takes the mean over its micro-batches itself, and the gradients are "
                f"{number} times too small",
                stacklevel=level_outside(),
            )
        elif self._reduction == "mean" and is_sum(loss, self._num_samples):
            warnings.warn(
                f"the loss of {self.where} is a sum over its {self._num_samples} samples, and is taken for their mean: "
                "the gradients are then the mean of the sums of all micro-batches. Add reduction='sum' to run.steps "
                "for their sum, or call step.backward(loss / n) with the mean over the n samples of the micro-batch",
                stacklevel=level_outside(),
            )

    def finish(self) -> None:
        """Check that the script has called backward.

        Raises:
            StepError: the script has not called it.
        """
        if self._first_weight is None:
            why = (
                ", and its loss.backward() reaches no trained parameter: was the model that computes the loss tracked "
                "(run.track(model=model))?"
                if self.has_foreign
                else " or loss.backward()"
            )
            unpacked = (
                ". If a batch is unpacked one loop too early (`for images, labels in run.steps(...)`, or in a round), "
                "write `for images, labels in step:` within that loop"
            )
            raise StepError(
                f"micro-batch {self.leaf} of {self._step} ended without step.backward(loss){why}. "
                f"To leave it out, call step.backward(loss, weight=0){unpacked if self._folder.is_new else ''}"
            )


def _replay_advice() -> str:
    """Return how to find the operation that gave a NaN; "" where that is what is being done."""
    if members.spec().run.settings.inspect:
        return ""
    return ". unisono replay RUN --step S --with anomaly names the operation"


def _checked(loss: Tensor, where: str) -> float:
    if not isinstance(loss, Tensor):
        raise LossError(f"{where}: step.backward needs the loss as a tensor, got a {type(loss).__qualname__}")
    if loss.numel() != 1:
        raise LossError(f"{where}: the loss has shape {tuple(loss.shape)}, it must be a scalar: take its mean")
    if not loss.requires_grad:
        raise LossError(
            f"{where}: the loss needs no gradient: it does not depend on a parameter that requires one "
            "(detached, computed under torch.no_grad(), or everything is frozen)"
        )
    return float(loss.detach())


def _checked_weight(weight: float | Tensor | None, num_samples: int, where: str) -> float:
    value = float(num_samples) if weight is None else float(weight)
    if not math.isfinite(value) or value < 0:
        raise LossError(f"{where}: a weight must be finite and at least 0, got {value}")
    return value
