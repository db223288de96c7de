"""Plain ``loss.backward()`` within the inner loop, which is taken over as ``step.backward(loss)``.

A call is taken over if it computes gradients of trained parameters and could be meant in no other way: for a tensor
with one element, without ``gradient=``, ``inputs=`` or ``create_graph=``, in the thread of the training loop. All other
calls go to torch. A loss that ``GradScaler.scale`` has scaled stands for the loss itself, with that scaler.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.core.errors import StepError
from unisono.engine.microbatch.graphs import reaches
from unisono.engine.microbatch.guards import watched_zero_grad
from unisono.engine.microbatch.losses import Microbatch

__all__ = ["taken_backward"]

Trained = Sequence[tuple[str, nn.Parameter]]
Take = Callable[[Tensor, Any, bool], None]
"""``step.backward`` of the current step: (loss, scaler, retain_graph)."""


@contextmanager
def taken_backward(
    microbatch: Callable[[], Microbatch | None], trained: Callable[[], Trained], take: Take
) -> Iterator[None]:
    """Return a context in which plain ``loss.backward()`` of a micro-batch goes to ``take``.

    Args:
        microbatch: returns the current one; None outside of one.
        trained: returns the parameters whose gradients are summed, by name.
    """
    taker = _Taker(microbatch, trained, take)
    if not _takers:
        _originals[:] = torch.Tensor.backward, torch.amp.GradScaler.scale
        torch.Tensor.backward = _wrap_backward(torch.Tensor.backward)  # type: ignore[method-assign]
        torch.amp.GradScaler.scale = _wrap_scale(torch.amp.GradScaler.scale)  # type: ignore[method-assign]
    _takers.append(taker)
    try:
        with watched_zero_grad(taker.note_zero_grad):
            yield
    finally:
        _takers.remove(taker)
        if not _takers:
            torch.Tensor.backward, torch.amp.GradScaler.scale = _originals  # type: ignore[method-assign]


class _Taker:
    def __init__(self, microbatch: Callable[[], Microbatch | None], trained: Callable[[], Trained], take: Take) -> None:
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
                "first are added to the step already. For gradients that are not trained with (of the inputs, say), "
                "use torch.autograd.grad; for another pass over the batch, `for ... in step.again()`"
            )
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
