"""The weights of a model as a safetensors file, and the SHA-256 of that file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.record import weights_file
from unisono.record.checkpoint_files import memory_at
from unisono.record.weights_file import Weight

__all__ = ["sha256_of_weights", "weight_of", "write_weights"]


def weight_of(name: str, value: Any, is_fetched: bool = False) -> Weight | None:
    """Return what a file says of an entry of a state dict; None: it is no tensor with data of its own.

    Args:
        is_fetched: the data of a meta tensor are elsewhere.
    """
    if not isinstance(value, Tensor) or value.layout is not torch.strided or (value.is_meta and not is_fetched):
        return None
    return Weight(name, str(value.dtype).removeprefix("torch."), value.shape, value.nbytes)


def write_weights(
    state: Mapping[str, Any], put: Callable[..., object], fetch: Callable[[str, Tensor], Tensor] | None = None
) -> None:
    """Give the bytes of a safetensors file with the tensors of a state dict to ``put``, piece by piece.

    Tensors that share memory are written each for itself.

    Args:
        state: tensors by name, on any device.
        fetch: gets a name and the tensor of ``state``, which may be a meta tensor, in the order of the file; returns
            the tensor, or an empty one where the bytes are of no interest. None: ``state`` has them.

    Raises:
        ValueError: a tensor has a dtype that such files do not have.
    """
    tensors = list(state.items())
    weights = [weight for name, value in tensors if (weight := weight_of(name, value, fetch is not None)) is not None]

    def content(at: int) -> Iterator[memoryview]:
        tensor = tensors[at][1] if fetch is None else fetch(*tensors[at])
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        yield memory_at(tensor.data_ptr(), tensor.nbytes, tensor)

    weights_file.write(weights, content, put)


def sha256_of_weights(state: Mapping[str, Any], fetch: Callable[[str, Tensor], Tensor] | None = None) -> str:
    """Return the SHA-256 of that file, as 64 hexadecimal digits; "": no such file can hold all of the state.

    Args:
        fetch: as of `write_weights`.
    """
    if not all(weight_of(name, value, fetch is not None) is not None for name, value in state.items()):
        return ""
    digest = hashlib.sha256()
    try:
        write_weights(state, digest.update, fetch)
    except ValueError:
        return ""
    return digest.hexdigest()
