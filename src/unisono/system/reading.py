"""Reads by the host of values that lie on a device. Each waits until everything is done that was launched before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["read"]


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU. All that lie on one device come with one wait; those on the CPU are returned as they
    are.
    """
    found = list(tensors)
    away: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            away.setdefault(tensor.device, []).append(index)
    for numbers in away.values():
        flat = [tensors[index].detach().contiguous().view(-1).view(torch.uint8) for index in numbers]
        parts = torch.cat(flat).cpu().split([len(one) for one in flat])
        for index, part in zip(numbers, parts, strict=True):
            found[index] = part.clone().view(tensors[index].dtype).view(tensors[index].shape)  # clone: aligned
    return found
