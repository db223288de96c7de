"""Buffers of the tracked modules: every micro-batch starts from the buffers of the step, and its changes are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.core.errors import StepError

__all__ = ["Buffers"]

COMPARED_FROM = 1 << 16
"""Buffers of more elements (masks, tables, codebooks) are compared before they are subtracted."""


class Buffers:
    """Buffers of the tracked modules: every micro-batch starts from those of the step, and its changes are summed.

    A buffer that is not persistent and gets another shape is a cache (of a mask, of rotations) and is left alone.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module, str]], shapes: Mapping[int, torch.Size]) -> None:
        """
        Args:
            named: (full name, the module that owns it, its name there).
            shapes: by index in ``named``, the shapes of buffers that are not persistent, when they were tracked.
        """
        self._shapes = shapes
        self.owners = [(module, attribute) for _, module, attribute in named]
        self.names = [name for name, _, _ in named]
        self._start: list[Tensor] = []
        self._seen: list[tuple[Tensor, int]] = []

    def tensors(self) -> list[Tensor]:
        return [self._tensor(index) for index in range(len(self.owners))]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return (name, buffer) for the layout. A cache has the shape of when it was tracked, equal on all workers."""
        tensors = self.tensors()
        for index, shape in self._shapes.items():
            if tensors[index].shape != shape:
                tensors[index] = torch.empty(shape, dtype=tensors[index].dtype, device="meta")
        return list(zip(self.names, tensors, strict=True))

    def start_step(self) -> None:
        """Remember the values that every micro-batch of this step starts from."""
        current = self.tensors()
        if not self._start:
            self._start = [now.detach().clone() for now in current]
        else:
            for index, now in enumerate(current):
                if self._touched(index, now):
                    self._start[index] = now.detach().clone()
        self._seen = [(now, now._version) for now in current]

    def take_changes(self, out: Sequence[Tensor], weight: float) -> None:
        """Write the changes of the micro-batch to ``out`` (of float buffers: times its weight), and undo them."""
        for index, (start, now) in enumerate(zip(self._start, self.tensors(), strict=True)):
            change = out[index]
            if change.shape != now.shape and start.shape == now.shape:  # a cache that has grown before
                change.zero_()
                continue
            if not self._touched(index, now):
                change.zero_()
                continue
            if start.shape != now.shape or start.is_complex():
                self._refuse(index, start, now)
                change.zero_()
                continue
            torch.sub(now.to(change.dtype), start.to(change.dtype), out=change)
            if start.dtype.is_floating_point:
                # inf - inf is NaN, but an entry that did not change has changed by 0.
                change.mul_(weight).masked_fill_(now == start, 0.0)
            now.copy_(start)
            self._seen[index] = (now, now._version)

    def restore(self) -> None:
        """Undo all changes since `start_step`; a buffer that has another shape now is left as it is."""
        for index, (start, now) in enumerate(zip(self._start, self.tensors(), strict=True)):
            if start.shape == now.shape and self._touched(index, now):
                now.copy_(start)
                self._seen[index] = (now, now._version)

    def apply(self, changes: Sequence[Tensor]) -> None:
        """Add the step's changes: the weighted mean for float buffers, the sum for integer ones, any for flags."""
        for index, (start, now, change) in enumerate(zip(self._start, self.tensors(), changes, strict=True)):
            if change.numel() and bool(change.any()):
                # A flag is turned over whether one micro-batch or several have turned it over.
                step = change.sign() if start.dtype is torch.bool else change
                moved = (start.to(change.dtype) + step).to(start.dtype)
                if start.dtype.is_floating_point and bool((start.isinf() & moved.isnan()).any()):
                    raise StepError(
                        f"buffer {self.names[index]!r} was infinite and is finite after this step: such a change has "
                        "no mean over the micro-batches. Give the buffer finite values before run.steps, e.g. by one "
                        "forward pass"
                    )
                now.copy_(torch.where(change == 0, start, moved))

    def _tensor(self, index: int) -> Tensor:
        module, attribute = self.owners[index]
        found = module._buffers.get(attribute)
        if found is None:
            raise StepError(
                f"buffer {self.names[index]!r} was a tensor, and is None or missing now. Keep it a tensor, or remove "
                "it between two calls of run.steps"
            )
        return found

    def _refuse(self, index: int, start: Tensor, now: Tensor) -> None:
        """Check a buffer whose change has no difference to sum: only a cache may change.

        Raises:
            StepError: another buffer has changed.
        """
        module, attribute = self.owners[index]
        if start.shape != now.shape and attribute not in module._non_persistent_buffers_set:
            raise StepError(
                f"buffer {self.names[index]!r} had shape {tuple(start.shape)} and has {tuple(now.shape)} after a "
                "micro-batch, only on the worker that computed the micro-batch. Give the buffer its final shape before "
                "run.steps, e.g. by one forward pass; or register it with persistent=False if it is a cache"
            )
        if start.shape == now.shape and not torch.equal(start, now):
            raise StepError(
                f"buffer {self.names[index]!r} ({start.dtype}) was changed within a micro-batch, and changes of "
                "complex buffers cannot be summed; register its real and imaginary parts (torch.view_as_real)"
            )

    def _touched(self, index: int, now: Tensor) -> bool:
        if 0 in now.stride() and now.numel() > 1:  # an expanded tensor cannot be written
            return not torch.equal(now, self._start[index])
        tensor, version = self._seen[index]
        if now is not tensor or now._version != version or now.numel() <= COMPARED_FROM:
            return True
        # The version counter is not enough: batch_norm and writes through `.data` do not count.
        return not torch.equal(now, self._start[index])
