"""Buffers of the tracked modules: every micro-batch starts from the buffers of the step, and its changes are summed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.core.errors import StepError
from unisono.engine.state.walk import buffer_in

__all__ = ["Buffers"]

COMPARED_FROM = 1 << 16
"""On the CPU, buffers of more elements (masks, tables, codebooks) are compared before they are subtracted."""


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

    def only(self, numbers: Sequence[int]) -> Buffers:
        """Return some of the buffers."""
        named = [(self.names[number], *self.owners[number]) for number in numbers]
        return Buffers(named, {new: self._shapes[old] for new, old in enumerate(numbers) if old in self._shapes})

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

    def take_changes(self, out: Sequence[Tensor], weight: float | Tensor) -> None:
        """Write the changes of the micro-batch to ``out`` (of float buffers: times its weight), and undo them."""
        changed = []
        for index, (start, now) in enumerate(zip(self._start, self.tensors(), strict=True)):
            # A cache that has grown before, or a buffer as it was.
            is_left = (out[index].shape != now.shape and start.shape == now.shape) or not self._touched(index, now)
            if not is_left and (start.shape != now.shape or start.is_complex()):
                self._refuse(index, start, now)
                is_left = True
            if is_left:
                out[index].zero_()
            else:
                changed.append(index)
        for numbers in self._alike(changed, out):
            dtype = out[numbers[0]].dtype
            start, now = _flat(self._start, numbers, dtype), _flat(self.tensors(), numbers, dtype)
            change = now - start
            if dtype.is_floating_point:
                # inf - inf is NaN, but an entry that did not change has changed by 0.
                there = weight.to(change.device) if isinstance(weight, Tensor) else weight
                # What does not count may be NaN.
                if isinstance(there, Tensor):
                    change.masked_fill_((there == 0.0) & ~change.isfinite(), 0.0)
                elif there == 0.0:
                    change.masked_fill_(~change.isfinite(), 0.0)
                change.mul_(there).masked_fill_(now == start, 0.0)
            _write(change, [out[index] for index in numbers])
        self._put_back(changed)

    def restore(self) -> None:
        """Undo all changes since `start_step`; a buffer that has another shape now is left as it is."""
        pairs = enumerate(zip(self._start, self.tensors(), strict=True))
        self._put_back([i for i, (start, now) in pairs if start.shape == now.shape and self._touched(i, now)])

    def may_break(self, changes: Sequence[Tensor]) -> Tensor:
        """Return whether a change is infinite or not a number: without one, `apply` raises nothing. () bool."""
        floats = [index for index, change in enumerate(changes) if change.is_floating_point()]
        groups = self._alike(floats, changes)
        flags = [~_flat(changes, numbers, changes[numbers[0]].dtype).isfinite().all() for numbers in groups]
        return torch.stack(flags).any() if flags else torch.tensor(False)

    def apply(self, changes: Sequence[Tensor], *, may_break: bool = True) -> None:
        """Add the step's changes: the weighted mean for float buffers, the sum for integer ones, any for flags.

        Args:
            may_break: what `may_break` has returned for the changes, if that is known. A change that may break is
                looked at, for which the host waits.

        Raises:
            StepError: a buffer was infinite, and would be finite after this step.
        """
        if may_break:
            self._check(changes)
        now = self.tensors()
        for numbers, start, change in self._moving(changes):
            _write(torch.where(change == 0, start, start + change), [now[index] for index in numbers])

    def _check(self, changes: Sequence[Tensor]) -> None:
        for numbers, wrong in self._wrong(changes):
            if not bool(wrong.any()):
                continue
            parts = wrong.split([changes[index].numel() for index in numbers])
            index = next(index for index, part in zip(numbers, parts, strict=True) if bool(part.any()))
            raise StepError(
                f"buffer {self.names[index]!r} was infinite and is finite after this step: such a change has no mean "
                "over the micro-batches. Give the buffer finite values before run.steps, e.g. with one forward pass"
            )

    def _wrong(self, changes: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield buffers of floats by dtype: (numbers, where they are infinite and their change is not)."""
        for numbers, start, change in self._moving(changes):
            if start.is_floating_point():
                yield numbers, start.isinf() & (start + change).isnan()

    def _moving(self, changes: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield what may have changed in the step, by dtype: (numbers, values at its beginning, changes), both (n,)."""
        found = []
        for index, (start, now, change) in enumerate(zip(self._start, self.tensors(), changes, strict=True)):
            fits = change.shape == start.shape == now.shape and change.numel() and not start.is_complex()
            if fits and not _is_expanded(now) and (change.device.type != "cpu" or bool(change.any())):
                found.append(index)
        for numbers in self._alike(found, changes):
            dtype = changes[numbers[0]].dtype
            start, change = _flat(self._start, numbers, dtype), _flat(changes, numbers, dtype)
            change = change.to(start.device)  # a buffer may have been left on the CPU
            # A flag is turned over whether one micro-batch or several have turned it over.
            yield numbers, start, change.sign() if self._start[numbers[0]].dtype is torch.bool else change

    def _alike(self, numbers: Iterable[int], changes: Sequence[Tensor]) -> Iterable[list[int]]:
        """Return buffers in groups that are computed together: an accelerator takes as long to begin as to compute."""
        groups: dict[tuple[torch.dtype, torch.dtype, torch.device], list[int]] = {}
        for index in numbers:
            start = self._start[index]
            groups.setdefault((start.dtype, changes[index].dtype, start.device), []).append(index)
        return groups.values()

    def _put_back(self, numbers: Sequence[int]) -> None:
        """Undo the changes of buffers."""
        now = self.tensors()
        if numbers:
            torch._foreach_copy_([now[index] for index in numbers], [self._start[index] for index in numbers])
        for index in numbers:
            self._seen[index] = (now[index], now[index]._version)

    def _tensor(self, index: int) -> Tensor:
        module, attribute = self.owners[index]
        found = buffer_in(module, attribute)
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
                "micro-batch, only on the worker that computed the micro-batch. Give the buffer its final shape "
                "before run.steps, e.g. with one forward pass; or register it with persistent=False if it is a cache"
            )
        if start.shape == now.shape and not torch.equal(start, now):
            raise StepError(
                f"buffer {self.names[index]!r} ({start.dtype}) was changed within a micro-batch, and changes of "
                "complex buffers cannot be summed; register its real and imaginary parts (torch.view_as_real)"
            )

    def _touched(self, index: int, now: Tensor) -> bool:
        if _is_expanded(now):  # it cannot be written
            return not torch.equal(now, self._start[index])
        tensor, version = self._seen[index]
        if now is not tensor or now._version != version or now.numel() <= COMPARED_FROM or now.device.type != "cpu":
            return True
        # The version counter is not enough: batch_norm and writes through `.data` do not count.
        return not torch.equal(now, self._start[index])


def _is_expanded(tensor: Tensor) -> bool:
    return 0 in tensor.stride() and tensor.numel() > 1


def _flat(tensors: Sequence[Tensor], numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return some of the tensors as one, (n,); of a dtype to which all can be converted without rounding."""
    flat = [tensors[index].reshape(-1) for index in numbers]
    return (torch.cat(flat) if len(flat) > 1 else flat[0]).to(dtype)


def _write(flat: Tensor, out: Sequence[Tensor]) -> None:
    """Write what `_flat` has put together to tensors of any dtype."""
    parts = flat.to(out[0].device).split([each.numel() for each in out])
    torch._foreach_copy_(list(out), [part.view(each.shape) for part, each in zip(parts, out, strict=True)])
