"""A look at streams before they are trained on: do they give the same samples again, and do they differ?"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import RecipeError
from unisono.core.stream_plan import WantedSamples
from unisono.engine.microbatch.bookmarks import is_stateful, share_states
from unisono.engine.microbatch.streams import Streams

__all__ = ["check_streams", "is_alike"]

COMPARED = 16
"""Samples of two streams, at least, that are alike only by mistake."""


def check_streams(data: Streams, seed: int, wanted: WantedSamples) -> bool:
    """Read the first samples of a stream twice, and where a mistake is likely those of another stream.

    Args:
        seed: of the run.

    Returns:
        Whether a state could be loaded into a stream: not if its iterable, or a part of it with a state, is the same
        object when the stream is made again, and would then begin in the middle.

    Raises:
        RecipeError: the samples differ from one time to the other, or two streams give the same ones.
    """
    number = max(COMPARED if data.divides else 2, wanted.number)
    (one, first), (another, second) = (_begin(data, seed, wanted, wanted.stream, number) for _ in range(2))
    if (place := _first_difference(first, second)) is not None:
        raise RecipeError(
            f"stream {wanted.stream} of {wanted.num_streams} gave two different samples at position {place} of epoch "
            f"{wanted.epoch} when it was made twice, with the random generators set alike. Each worker that computes "
            "its micro-batch makes it by itself, so it must follow from (stream, num_streams, epoch) and the global "
            "generators of torch, numpy and random: no clock, no pid, no generator seeded by itself (WebDataset: "
            "shuffle(n, seed=...) or no shuffle, and unisono.Streams(..., shuffle=n)), no order of a set or of the "
            "file system, no state from the time before"
        )
    if data.divides and wanted.num_streams > 1:
        _check_divided(data, seed, wanted, first)
    return not (is_stateful(one) and share_states(one, another))


def _check_divided(data: Streams, seed: int, wanted: WantedSamples, first: list[Any]) -> None:
    """Raise RecipeError if another stream begins with the same samples."""
    other = (wanted.stream + 1) % wanted.num_streams
    _, theirs = _begin(data, seed, wanted, other, len(first))
    is_constant = all(is_alike(first[0], one) for one in first[1:])
    if first and not is_constant and _first_difference(first, theirs, unknown=False) is None:
        raise RecipeError(
            f"streams {wanted.stream} and {other} of {wanted.num_streams} begin with the same {len(first)} samples: "
            "this dataset does not divide its data. Its __iter__ must read the part that "
            "torch.utils.data.get_worker_info() names (id of num_workers), as for a DataLoader with worker processes; "
            "or say it with unisono.Streams(lambda stream, num_streams, epoch: ...)"
        )


def _begin(data: Streams, seed: int, wanted: WantedSamples, stream: int, number: int) -> tuple[Any, list[Any]]:
    """Return the iterable of a stream, and its first samples, before they are shuffled."""
    opened = data.opened(seed, stream, wanted.num_streams, wanted.epoch)
    source = iter(opened)
    samples: list[Any] = []
    for position in range(number):
        try:
            samples.append(data.sample(source, seed, stream, wanted.epoch, position))
        except StopIteration:
            break
    return opened, samples


def _first_difference(first: Sequence[Any], second: Sequence[Any], *, unknown: bool = True) -> int | None:
    missing = object()
    pairs = itertools.zip_longest(first, second, fillvalue=missing)
    return next((place for place, (a, b) in enumerate(pairs) if not is_alike(a, b, unknown=unknown)), None)


def is_alike(a: Any, b: Any, *, unknown: bool = True) -> bool:
    """Return whether two samples are equal, as far as they are made of tensors, arrays, collections and plain values.

    Args:
        unknown: whether anything else counts as equal to what has its type.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.layout is not torch.strided or a.is_quantized:
            return unknown
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, (numpy.ndarray, numpy.generic)):
        if a.dtype.hasobject:
            return unknown
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_alike(a[key], b[key], unknown=unknown) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_alike(*pair, unknown=unknown) for pair in zip(a, b, strict=True))
    if isinstance(a, (str, bytes, bytearray, int, bool, type(None))):
        return bool(a == b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return unknown


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
