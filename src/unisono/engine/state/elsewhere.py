"""A tensor that is on other workers, where this worker needs something in its place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unisono.core.errors import UsageError

__all__ = ["Elsewhere"]

_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class Elsewhere(Tensor):
    """Has the shape, strides, dtype and device of another tensor, and no content. Whatever reads it raises.

    As the gradient of a parameter, ``zero_grad()`` may drop it or set it to zero, as it does where the gradient is.

    Args:
        like: the other tensor, e.g. a parameter.
        why: what the error says.
    """

    _why: str

    @staticmethod
    def __new__(cls, like: Tensor, why: str) -> Elsewhere:
        found: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=like.dtype, device=like.device
        )
        found._why = why
        return found

    def __init__(self, like: Tensor, why: str) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Elsewhere)]
        if func not in _ZERO:
            raise UsageError(found[0]._why)
        if others := [one for one in tree_leaves(args) if not isinstance(one, Elsewhere)]:
            torch._foreach_zero_(others)
        return args[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere({tuple(self.shape)}, {self.dtype}): {self._why}"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(self._why)

    numpy = tolist = data_ptr = __array__ = __deepcopy__ = __reduce_ex__ = _refuse
