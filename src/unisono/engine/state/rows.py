"""Rows of an evaluation, one for each sample: those of one batch packed as bytes, those of all batches joined."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from unisono.core.errors import UsageError
from unisono.engine.state.packing import from_bytes, to_bytes

__all__ = ["check_bytes", "join", "pack"]

MOST_BYTES: Final = 1 << 30
"""Of the rows of one evaluation: each worker gets them all."""


def pack(name: str, rows: Any, num_samples: int) -> Tensor:
    """Return the rows of one batch as bytes: (n,) uint8, on the CPU.

    Args:
        rows: a tensor or numpy array of so many rows, or a list or tuple of so many items.

    Raises:
        UsageError: it is none of these, has another number of rows, or an item cannot be sent.
    """
    what = f"run.collect({name}=...)"
    if isinstance(rows, Tensor) or _is_array(rows):
        found, how = rows.shape[0] if len(rows.shape) else None, f"of shape {tuple(rows.shape)}"
    elif isinstance(rows, (list, tuple)):
        rows, found, how = list(rows), len(rows), f"of {len(rows)} items"
    else:
        found, how = None, "alone"
    if found != num_samples:
        raise UsageError(
            f"{what} got a {type(rows).__qualname__} {how} for a batch of {num_samples} samples: give one row for each "
            f"sample, a tensor or array whose first dimension is {num_samples}, or a list of {num_samples} items. "
            "(run.total adds up a number)"
        )
    return torch.frombuffer(bytearray(to_bytes(rows, what)), dtype=torch.uint8)


def join(name: str, batches: Sequence[Tensor]) -> Any:
    """Return the rows of all batches, in their order: a tensor, an array or a list, as they were collected.

    Raises:
        UsageError: those of two batches do not fit together.
    """
    parts = [from_bytes(batch.numpy().tobytes()) for batch in batches]
    kinds = [_kind(part) for part in parts]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UsageError(
                f"run.collect({name}=...) got {kinds[0]} in batch 0, and {kind} in batch {number}. Rows of several "
                f"widths are collected as a list with one item for each sample: run.collect({name}=list(rows))"
            )
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], list):
        return list(chain.from_iterable(parts))
    import numpy

    return numpy.concatenate(parts)


def check_bytes(sizes: Mapping[str, int]) -> None:
    """Raise UsageError if the rows of all batches, in bytes by name, are too many for every worker to have them."""
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UsageError(
            f"the evaluation has collected {total:,} bytes, most of them as {largest!r}, and every worker would get "
            f"all of them: at most {MOST_BYTES:,} can be collected. Collect less of each sample (scores.argmax(1), "
            "scores.half()), add up what is needed (run.total), or give the evaluation a part of the data at a time"
        )


def _kind(rows: Any) -> str:
    """Return in words what has to be equal for rows to be joined."""
    if isinstance(rows, list):
        return "a list"
    noun = "tensor" if isinstance(rows, Tensor) else "array"
    return f"a {str(rows.dtype).removeprefix('torch.')} {noun} with rows of shape {tuple(rows.shape[1:])}"


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
