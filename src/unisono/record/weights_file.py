"""The bytes of a safetensors file with the tensors of a state dict, as the library safetensors writes them.

So ``sha256sum model.safetensors`` gives what the journal's last line and a certificate say of a model, whoever has
written the file: ``safetensors.torch.save_file(model.state_dict(), ...)`` or ``unisono checkpoints DIR export``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from unisono.record.checkpoint_files import KINDS

__all__ = ["Weight", "arranged", "header", "write"]

_ALIGNMENT: Final = 8
_ORDER: Final = (
    *("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "int16", "uint16", "float16", "bfloat16", "int32"),
    *("uint32", "float32", "complex64", "float64", "int64", "uint64"),
)
"""Of dtypes, from the one whose tensors stand last in a file to the one whose tensors stand first."""


class Weight(NamedTuple):
    """A tensor of a state dict."""

    name: str
    dtype: str
    """As torch calls it: ``float32``."""
    shape: Sequence[int]
    num_bytes: int


def arranged(weights: Sequence[Weight]) -> list[int]:
    """Return the places of the tensors in ``weights`` in the order in which they stand in the file.

    Raises:
        ValueError: a dtype has no name in such files; says which.
    """
    for weight in weights:
        if weight.dtype not in _ORDER:
            raise ValueError(f"a safetensors file holds no tensors of {weight.dtype}, and {weight.name!r} is one")
    return sorted(range(len(weights)), key=lambda at: (-_ORDER.index(weights[at].dtype), weights[at].name.encode()))


def header(weights: Sequence[Weight]) -> bytes:
    """Return what stands before the tensors in the file.

    Args:
        weights: in the order of the file.
    """
    start, entries = 0, {}
    for weight in weights:
        end = start + weight.num_bytes
        entries[weight.name] = {
            "dtype": KINDS[weight.dtype], "shape": list(weight.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write(weights: Sequence[Weight], content: Callable[[int], memoryview | bytes], put: Callable[..., object]) -> None:
    """Give the bytes of a file to ``put``, piece by piece.

    Args:
        content: returns the bytes of a tensor, by its place in ``weights``.

    Raises:
        ValueError: see `arranged`.
    """
    order = arranged(weights)
    put(header([weights[at] for at in order]))
    for at in order:
        if weights[at].num_bytes:
            put(content(at))
