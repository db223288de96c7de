"""One micro-batch as the script computes it: its losses and their weight, and the checks of both.

A loss that lies on a device is not looked at before the last backward of the step has been launched: whoever looks
waits for the forward pass, and the device has nothing to do meanwhile. `check_losses` looks at all of a step.

Plain ``loss.backward()`` within the inner loop is taken over as ``step.backward(loss)`` (`taken_backward`), if it
computes gradients of trained parameters and could be meant in no other way: for a tensor with one element, without
``gradient=``, ``inputs=`` or ``create_graph=``, in the thread of the training loop. All other calls go to torch. A loss
that ``GradScaler.scale`` has scaled stands for the loss itself, with that scaler.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.cluster.worker import member as members
from unisono.core.errors import LossError, StepError
from unisono.engine.microbatch.doubts import About, Doubts, rows_of
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.graphs import reaches
from unisono.engine.microbatch.guards import watched_zero_grad
from unisono.system import accelerators
from unisono.system.reading import read

__all__ = ["Microbatch", "Reduction", "check_losses", "taken_backward"]

Reduction = Literal["mean", "sum"]
"""What the losses are, over the samples of a micro-batch."""
Trained = Sequence[tuple[str, nn.Parameter]]
Take = Callable[[Tensor, Any, bool], None]
"""``step.backward`` of the current step: (loss, scaler, retain_graph)."""


class Microbatch:
    """One micro-batch, from its loading until its gradient is folded.

    Args:
        step: its step, as messages name it.
        num_samples: the weight of a loss that gives none.
        samples: returns the indices of its samples, for errors.
        scale: a power of two that all weights are divided by.
        doubts: of the run.
        num_microbatches: of its step.
        reduction: "sum": the gradients are those of the losses as they are, and a weight is for buffers only.

    Attributes:
        weight: of all its losses, scaled; 0 if it does not count. () float64 where it was given on a device.
        weighted_loss: sum of weight * loss over its losses; of the losses, where they are sums. () float64 where the
            losses lie; 0.0 if it has none.
        unread: its losses that nobody has looked at yet, with their weights, scaled, and their dtypes.
        is_in_backward: whether gradients are being computed.
        is_empty: whether all of its samples are left out: it has weight 0, and the script does not get it.
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
        doubts: Doubts,
        num_microbatches: int,
        reduction: Reduction = "mean",
    ) -> None:
        self.leaf = leaf
        self.where = f"{step}, micro-batch {leaf}"
        self.weight: float | Tensor = 0.0
        self.weighted_loss: float | Tensor = 0.0
        self.unread: list[tuple[Tensor, float | Tensor, torch.dtype]] = []
        self.is_in_backward = self.has_foreign = self.is_scaled = False
        self.stream: Any = None
        self._reduction: Reduction = reduction
        self.doubts = doubts
        self.about = About(self.where, num_samples, num_microbatches, reduction)
        self._folder = folder
        self._step = step
        self._num_samples = num_samples
        self.is_empty = num_samples == 0
        self._samples = samples
        self._scale = scale
        self._has_loss = False
        self._first_weight: float | None = None  # the scaled weight that its first loss has asked for

    def backward(self, loss: Tensor | None, weight: float | Tensor | None, scaler: Any, *, retain_graph: bool) -> None:
        """Compute the gradients of a loss and fold them; see `unisono.Step.backward`."""
        if _leaves_out(loss, weight):
            self._check_weight(0.0, torch.float32)
            self._has_loss, self.weight = True, 0.0
            return
        _check_loss(loss, self.where)
        assert loss is not None
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
            if is_read:
                value = float(value)
                self._check_value(value)
            else:
                self.unread.append((on_device, share, loss.dtype))
            # The weight as the loss's own dtype can express it, so that sum and total agree.
            self.weight = float(torch.tensor(share, dtype=loss.dtype)) if self._reduction == "mean" else share
        self.doubts.look(self.about, loss, has_weight=weight is not None, retain_graph=retain_graph)
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

    def note_batch(self, batch: Any) -> None:
        """Note the batch that the script gets."""
        self.about = dataclasses.replace(self.about, num_rows=rows_of(batch, self._num_samples))

    def take_over(self, weight: float | Tensor, weighted_loss: float | Tensor) -> None:
        """Take what another worker has found, which has computed its loss."""
        self.weight, self.weighted_loss, self._has_loss = weight, weighted_loss, True

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
                f"{given:g}; a single division by the total weight cannot serve both: give them the same weight and "
                "scale the loss itself"
            )
        self._first_weight = share
        if self._reduction == "mean" and not math.isfinite(float(torch.tensor(share, dtype=dtype))):
            raise LossError(
                f"{self.where}: the weight {given:g} is too large for a loss of {dtype}; give the loss in float32: "
                "step.backward(loss.float(), ...)"
            )

    def finish(self) -> None:
        """Check that the script has called backward, if it got the micro-batch: there is none without samples.

        Raises:
            StepError: the script has not called it.
        """
        if not self._has_loss and not self.is_empty:
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
                "To leave it out, call step.backward(None, weight=0)"
                f"{unpacked if self._folder.is_new else ''}"
            )
        if not self.is_empty:
            self.doubts.end(self.about)


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


def _leaves_out(loss: Tensor | None, weight: float | Tensor | None) -> bool:
    """Return whether the weight is known to be 0. On a device it is looked at only if the loss has no gradient."""
    if weight is None:
        return False
    is_there = isinstance(weight, Tensor) and accelerators.adds_on(weight.device).type != "cpu"
    return not (is_there and isinstance(loss, Tensor) and loss.requires_grad) and float(weight) == 0.0


def _check_loss(loss: Tensor | None, where: str) -> None:
    if not isinstance(loss, Tensor):
        raise LossError(
            f"{where}: step.backward needs the loss as a tensor, got a {type(loss).__qualname__}. To leave the "
            "micro-batch out, call step.backward(None, weight=0)"
        )
    if loss.numel() != 1:
        raise LossError(f"{where}: the loss has shape {tuple(loss.shape)}, it must be a scalar: take its mean")
    if not loss.requires_grad:
        raise LossError(
            f"{where}: the loss has no gradient: it does not depend on a parameter that requires one (detached, "
            "computed under torch.no_grad(), or everything is frozen). To leave the micro-batch out, call "
            "step.backward(loss, weight=0)"
        )


# -- plain loss.backward() ---------------------------------------------------------------------------


@contextmanager
def taken_backward(
    microbatch: Callable[[], Microbatch | None],
    trained: Callable[[], Trained],
    take: Take,
    has_no_gradient: Callable[[], bool],
) -> Iterator[None]:
    """Return a context in which plain ``loss.backward()`` of a micro-batch goes to ``take``.

    Args:
        microbatch: returns the current one; None outside of one.
        trained: returns the parameters whose gradients are summed, by name.
        has_no_gradient: returns whether nothing in the current step counts. A ``GradScaler``, which takes that for an
            error, does nothing then.
    """
    taker = _Taker(microbatch, trained, take, has_no_gradient)
    if not _takers:
        _originals[:] = [getattr(owner, name) for owner, name, _ in _WRAPPED]
        for (owner, name, wrap), original in zip(_WRAPPED, _originals, strict=True):
            setattr(owner, name, wrap(original))
    _takers.append(taker)
    try:
        with watched_zero_grad(taker.note_zero_grad):
            yield
    finally:
        _takers.remove(taker)
        if not _takers:
            for (owner, name, _), original in zip(_WRAPPED, _originals, strict=True):
                setattr(owner, name, original)


class _Taker:
    def __init__(
        self,
        microbatch: Callable[[], Microbatch | None],
        trained: Callable[[], Trained],
        take: Take,
        has_no_gradient: Callable[[], bool],
    ) -> None:
        self.has_no_gradient = has_no_gradient
        self._microbatch = microbatch
        self._trained = trained
        self._take = take
        self._thread = threading.get_ident()
        self._known: Trained = ()
        self._ids: frozenset[int] = frozenset()
        self._scaled = WeakIdKeyDictionary()
        """What a scaler has returned within a micro-batch -> (the loss, the scaler)."""
        self._has_taken: Microbatch | None = None
        self._has_dropped: Microbatch | None = None

    def takes(self, loss: Tensor, *, retain_graph: bool) -> bool:
        """Take a call over, if it is meant for the current micro-batch. Returns whether it was."""
        microbatch = self._current()
        if microbatch is None or microbatch.is_in_backward or loss.numel() != 1:
            return False
        loss, scaler = self._scaled.get(loss, (loss, None))
        if loss.requires_grad and not reaches(loss, self._trained_ids()):
            microbatch.has_foreign = True
            return False
        if self._has_dropped is microbatch:
            raise StepError(
                f"zero_grad() was called between two loss.backward() of {microbatch.where}, but the gradients of the "
                "first are already part of the step. For gradients that are not for training (of the inputs, say), "
                "use torch.autograd.grad; for another pass over the batch, `for ... in step.again()`"
            )
        microbatch.doubts.look_taken(microbatch.about, loss, self._trained_ids())
        self._take(loss, scaler, retain_graph)
        self._has_taken = microbatch
        return True

    def note_scaled(self, outputs: Any, result: Any, scaler: Any) -> None:
        """Remember which loss a scaler has scaled."""
        if isinstance(outputs, Tensor):
            if result is not outputs and self._current() is not None:
                self._scaled[result] = (outputs, scaler)
        elif isinstance(outputs, (list, tuple)):
            for own, scaled in zip(outputs, result, strict=True):
                self.note_scaled(own, scaled, scaler)

    def note_zero_grad(self, cleared: object) -> None:
        """Note that the script drops gradients: of those that were taken over, this is impossible."""
        microbatch = self._current()
        if microbatch is None or microbatch is not self._has_taken:
            return
        if isinstance(cleared, nn.Module):
            parameters: Sequence[Tensor] = list(cleared.parameters())
        else:
            groups = getattr(cleared, "param_groups", [])
            parameters = [parameter for options in groups for parameter in options["params"]]
        if not self._trained_ids().isdisjoint(map(id, parameters)):
            self._has_dropped = microbatch

    def _current(self) -> Microbatch | None:
        return self._microbatch() if threading.get_ident() == self._thread else None

    def _trained_ids(self) -> frozenset[int]:
        if (trained := self._trained()) is not self._known:
            self._known, self._ids = trained, frozenset(id(parameter) for _, parameter in trained)
        return self._ids


_takers: Final[list[_Taker]] = []
_originals: Final[list[Any]] = []


def _wrap_backward(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(
        self: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if gradient is None and inputs is None and not create_graph:
            for taker in reversed(_takers):
                if taker.takes(self, retain_graph=bool(retain_graph)):
                    return
        original(self, gradient, retain_graph, create_graph, inputs)

    return backward


def _wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        for taker in _takers:
            taker.note_scaled(outputs, result, self)
        return result

    return scale


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.is_enabled() and any(taker.has_no_gradient() for taker in _takers):
            return None
        return original(self, *arguments, **options)

    return update


_WRAPPED: Final[Sequence[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]] = (
    (torch.Tensor, "backward", _wrap_backward),
    (torch.amp.GradScaler, "scale", _wrap_scale),
    *((torch.amp.GradScaler, name, _wrap_update) for name in ("unscale_", "step", "update")),
)
"""(class, method, what it is wrapped in) while there is a loop."""
