"""Parameters, buffers, modes and attributes of tracked objects at an earlier time, to compute with them again."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.engine.state.packing import same_bits
from unisono.engine.state.tracked import Tracked

__all__ = ["Values"]


class Values:
    """Parameters, buffers, modes and attributes of the tracked objects at one time."""

    def __init__(self, tracked: Tracked, before: Values | None = None) -> None:
        """
        Args:
            before: earlier values; what has not changed since and is not trained shares their memory.
        """
        self._modes = [(module, module.training) for _, module in tracked.walk().with_modes]
        self._attributes, self._set = tracked.attributes, tracked.attributes.state(warns=False)
        live = [parameter for _, parameter in tracked.parameters()]
        self._buffers = {
            (owner, name): buffer
            for module in tracked.modules.values()
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }
        self._pairs: list[tuple[Tensor, Tensor]] = []
        known = {id(one): copy for one, copy in before._pairs} if before is not None else {}
        for tensor in [*live, *self._buffers.values()]:
            copy = known.get(id(tensor))
            if copy is None or tensor.requires_grad or not same_bits(tensor, copy):
                copy = tensor.detach().clone()
            self._pairs.append((tensor, copy))

    def put(self) -> None:
        """Put them in force."""
        with torch.no_grad():
            for tensor, copy in self._pairs:
                if tensor.shape == copy.shape:  # a cache may have grown
                    tensor.copy_(copy)
        for (owner, name), buffer in self._buffers.items():
            owner._buffers[name] = buffer
        for part, training in self._modes:
            part.training = training
        self._attributes.load(self._set)
