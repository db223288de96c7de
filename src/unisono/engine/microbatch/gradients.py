"""The memory of gradients: what an optimizer expects of it, and whether it may be kept."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.engine.exchange.flat import num_tensors_on

__all__ = ["gradient_of", "is_private"]


def gradient_of(parameter: Tensor, mean: Tensor) -> Tensor:
    """Return the mean as the gradient of a parameter: with its dtype and its strides, as autograd's own gradients.

    A fused optimizer goes through the memory of a parameter and of its gradient side by side. With other strides (a
    model in ``torch.channels_last``) it would take the gradient of another element, without an error on the CPU.

    Returns:
        A view of ``mean``, by which the slot knows that somebody holds it (`Slot.is_shared`); or a copy.
    """
    if mean.device == parameter.device and mean.dtype == parameter.dtype and mean.stride() == parameter.stride():
        return mean.view_as(mean)
    return torch.empty_like(parameter, requires_grad=False).copy_(mean)


def is_private(gradient: Tensor) -> bool:
    """Return whether nothing else holds the memory of a gradient. Else the next backward may write there: a replayed
    CUDA graph does, and so does a function that has one buffer for all its gradients. Torch counts who uses memory of
    its own, and nobody counts who uses that of others, e.g. of numpy, which torch may not resize.
    """
    is_cached = torch._C._is_cached_tensor(gradient)  # type: ignore[attr-defined]  # torch.compile's CUDA graphs
    return num_tensors_on(gradient) == 1 and gradient.untyped_storage().resizable() and not is_cached
