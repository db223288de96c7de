"""One micro-batch as the script computes it: its losses and their weight, and the checks of both.

A loss that lies on a device is not looked at before the last backward of the step has been launched: whoever looks
waits for the forward pass, and the device has nothing to do meanwhile. `check_losses` looks at all of a step.
"""

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
from unisono.system import accelerators
from unisono.system.reading import read
from unisono.system.stacks import level_outside

__all__ = ["Microbatch", "Reduction", "check_losses"]

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
        weight: of all its losses, scaled; 0 if it does not count. () float64 where it was given on a device.
        weighted_loss: sum of weight * loss over its losses; of the losses, where they are sums. () float64 where the
            losses lie; 0.0 if it has none.
        unread: its losses that nobody has looked at yet, with their weights, scaled, and their dtypes.
        is_in_backward: whether gradients are being computed.
        has_foreign: whether the script has computed gradients that reach no trained parameter.
        is_scaled: whether its gradients have the scale of a ``GradScaler``.
        stream: of the device, on which its gradients are computed; None: there is one only.
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
        self.weight: float | Tensor = 0.0
        self.weighted_loss: float | Tensor = 0.0
        self.unread: list[tuple[Tensor, float | Tensor, torch.dtype]] = []
        self.is_in_backward = self.has_foreign = self.is_scaled = False
        self.stream: Any = None
        self._reduction = reduction
        self._folder = folder
        self._step = step
        self._num_samples = num_samples
        self._samples = samples
        self._scale = scale
        self._has_loss = False
        self._first_weight: float | None = None  # the scaled weight that its first loss has asked for

    def backward(self, loss: Tensor, weight: float | Tensor | None, scaler: Any, *, retain_graph: bool) -> None:
        """Compute the gradients of a loss and fold them; see `unisono.Step.backward`."""
        _check_loss(loss, self.where)
        self._has_loss = True
        self.stream = accelerators.stream(loss.device)
        is_read = accelerators.adds_on(loss.device).type == "cpu" or bool(members.spec().run.settings.inspect)
        on_device = loss.detach().reshape(())
        on_device = (on_device.cpu() if is_read else on_device).to(torch.float64)
        value: float | Tensor = on_device
        factor: float | Tensor = 1.0
        is_left_out: Tensor | None = None
        if not is_read and isinstance(weight, Tensor) and weight.device == loss.device:
            there = weight.detach().reshape(()).to(torch.float64) / self._scale
            is_left_out = there == 0.0
            self.unread.append((on_device, there, loss.dtype))
            value = on_device.masked_fill(is_left_out, 0.0)
            self.weight = there.to(loss.dtype).to(torch.float64) if self._reduction == "mean" else there
        else:
            share = (float(self._num_samples) if weight is None else float(weight)) / self._scale
            self._check_weight(share, loss.dtype)
            if share == 0.0:
                self.weight = 0.0
                return
            if is_read:
                value = float(value)
                self._check_value(value)
            else:
                self.unread.append((on_device, share, loss.dtype))
            # The weight as the loss's own dtype can express it, so that sum and total agree.
            self.weight = float(torch.tensor(share, dtype=loss.dtype)) if self._reduction == "mean" else share
        self._look(loss)
        if self._reduction == "mean":
            factor = self.weight
        self.weighted_loss = value * factor + self.weighted_loss
        seed = factor if isinstance(factor, Tensor) else torch.full_like(loss, factor)
        if scaler is not None and scaler.is_enabled():
            seed = scaler.scale(seed)  # where the scale lies: its value is not asked for
            self.is_scaled = True
        self.is_in_backward = True
        try:
            self._folder.backward(loss, seed, is_left_out, retain_graph=retain_graph)
        finally:
            self.is_in_backward = False

    def check(self, value: float, share: float, dtype: torch.dtype) -> None:
        """Check one of its losses.

        Args:
            share: its weight, scaled.

        Raises:
            LossError: it is not finite, and counts; or the weight makes no sense.
        """
        self._check_weight(share, dtype)
        if share:
            self._check_value(value)

    def _check_value(self, value: float) -> None:
        if not math.isfinite(value):
            raise LossError(
                f"the loss of {self.where} is {value} (samples {self._samples()}); nothing was updated"
                f"{_replay_advice()}",
                microbatch=self.leaf,
            )

    def _check_weight(self, share: float, dtype: torch.dtype) -> None:
        given = share * self._scale
        if not math.isfinite(share) or share < 0:
            raise LossError(f"{self.where}: a weight must be finite and at least 0, got {given}")
        if self._first_weight is not None and share != self._first_weight:
            raise LossError(
                f"{self.where}: the losses of one micro-batch have weights {self._first_weight * self._scale:g} and "
                f"{given:g}; one division by the total weight cannot serve both: give them the same weight and scale "
                "the loss itself"
            )
        self._first_weight = share
        if self._reduction == "mean" and not math.isfinite(float(torch.tensor(share, dtype=dtype))):
            raise LossError(
                f"{self.where}: the weight {given:g} is too large for a loss of {dtype}; give the loss in float32: "
                "step.backward(loss.float(), ...)"
            )

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
        if not self._has_loss:
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


def check_losses(microbatches: Sequence[Microbatch]) -> None:
    """Look at the losses of micro-batches that nobody has looked at yet, with one wait for the device.

    Raises:
        LossError: one is not finite, or its weight makes no sense.
    """
    unread = [(each, *one) for each in microbatches for one in each.unread]
    pairs = [(value, torch.as_tensor(share, dtype=torch.float64)) for _, value, share, _ in unread]
    found = list(map(float, read([one for pair in pairs for one in pair])))
    for (each, _, _, dtype), value, share in zip(unread, found[::2], found[1::2], strict=True):
        each.check(value, share, dtype)


def _replay_advice() -> str:
    """Return how to find the operation that gave a NaN; "" where that is what is being done."""
    if members.spec().run.settings.inspect:
        return ""
    return ". unisono replay RUN --step S --with anomaly names the operation"


def _check_loss(loss: Tensor, where: str) -> None:
    if not isinstance(loss, Tensor):
        raise LossError(f"{where}: step.backward needs the loss as a tensor, got a {type(loss).__qualname__}")
    if loss.numel() != 1:
        raise LossError(f"{where}: the loss has shape {tuple(loss.shape)}, it must be a scalar: take its mean")
    if not loss.requires_grad:
        raise LossError(
            f"{where}: the loss needs no gradient: it does not depend on a parameter that requires one "
            "(detached, computed under torch.no_grad(), or everything is frozen)"
        )
