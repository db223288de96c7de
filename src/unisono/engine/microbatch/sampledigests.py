"""Digests of samples, by what they hold: equal in all processes for equal samples."""

from __future__ import annotations

import collections
import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import UsageError

__all__ = ["digest_of_sample", "together"]


def digest_of_sample(sample: Any) -> bytes:
    """Return a digest of a sample that is made of tensors, arrays, images, collections and plain values.

    Raises:
        UsageError: there is something else in it.
    """
    found = hashlib.blake2b(digest_size=16)
    _add(found, sample)
    return found.digest()


def together(digests: Iterable[bytes]) -> bytes:
    """Return one digest for several, in their order."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def _add(found: Any, value: Any) -> None:
    found.update(f"{type(value).__qualname__} ".encode())
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UsageError(f"a sample has a tensor ({value.layout}) that cannot be compared")
        found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(flat.numpy())
    elif isinstance(value, (str, int, float, complex, type(None))):
        text = struct.pack("<d", value) if isinstance(value, float) else repr(value).encode()
        found.update(len(text).to_bytes(8, "little") + text)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        found.update(len(value).to_bytes(8, "little"))
        found.update(value)
    elif isinstance(value, Mapping):
        found.update(f"{len(value)} ".encode())
        for key, item in value.items():
            _add(found, key)
            _add(found, item)
    elif isinstance(value, (set, frozenset)):
        for digest in sorted(map(digest_of_sample, value)):
            found.update(digest)
    elif isinstance(value, (list, tuple, collections.deque)):
        found.update(f"{len(value)} ".encode())
        for item in value:
            _add(found, item)
    elif callable(content := getattr(value, "tobytes", None)):  # arrays of numpy, images of PIL
        found.update(f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} ".encode())
        _add_array(found, value, content)
    elif hasattr(value, "__dict__"):
        _add(found, vars(value))
    else:
        raise UsageError(f"a sample has a {type(value).__qualname__}, which cannot be compared")


def _add_array(found: Any, value: Any, content: Any) -> None:
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        _add(found, value.tolist())
    else:
        found.update(content())
