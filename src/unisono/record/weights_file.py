"""The bytes of a safetensors file with the tensors of a state dict, as the library safetensors writes them.

So ``sha256sum model.safetensors`` gives what the journal's last line and a certificate say of a model, whoever has
written the file: ``safetensors.torch.save_file(model.state_dict(), ...)`` or ``unisono checkpoints DIR export``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from unisono.record.checkpoint_files import KINDS, Entry, encode_header

__all__ = ["Weight", "write"]

_ALIGNMENT: Final = 8
_RANKS: Final = {dtype: rank for rank, dtype in enumerate(KINDS)}


class Weight(NamedTuple):
    """A tensor of a state dict."""

    name: str
    dtype: str
    """As torch calls it: ``float32``."""
    shape: Sequence[int]
    num_bytes: int


def write(
    weights: Sequence[Weight], content: Callable[[int], Iterable[memoryview | bytes]], put: Callable[..., object]
) -> None:
    """Give the bytes of a file to ``put``, piece by piece.

    Args:
        content: returns the bytes of a tensor, by its place in ``weights``, in pieces.

    Raises:
        ValueError: a dtype has no name in such files; says which.
    """
    for weight in weights:
        if weight.dtype not in _RANKS:
            raise ValueError(f"a safetensors file holds no tensors of {weight.dtype}, and {weight.name!r} is one")
    order = sorted(range(len(weights)), key=lambda at: (-_RANKS[weights[at].dtype], weights[at].name.encode()))
    entries: list[Entry] = []
    start = 0
    for weight in (weights[at] for at in order):
        entries.append(Entry(weight.name, weight.dtype, list(weight.shape), 0, start, weight.num_bytes))
        start += weight.num_bytes
    put(encode_header(entries, _ALIGNMENT))
    for at in order:
        for piece in content(at) if weights[at].num_bytes else ():
            put(piece)
