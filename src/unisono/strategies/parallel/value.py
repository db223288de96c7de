"""`Sharded`: a tensor of which each shard has a part, between a layer that is cut and the next one.

To the model's code it is a tensor of the whole shape. A function that is called with it is called with the part of each
shard instead, so that each shard is computed in the same shapes wherever it is. That is right for functions that leave
the cut dimension alone; those that are not known to do so (`unisono.strategies.parallel.functions`) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import UsageError
from unisono.strategies.parallel.place import Place
from unisono.strategies.parallel.place import whole as put_together

__all__ = ["Handler", "Sharded", "check_recorded", "register", "whole"]

Handler = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Computes a function by shards: given the function, its arguments and its named arguments."""

_handlers: dict[str, Handler] = {}

_KNOWN = (
    {"dim", "dtype", "device", "element_size", "hash", "is_complex", "is_cpu", "is_cuda"}
    | {"is_floating_point", "is_meta", "is_nested", "is_quantized", "is_sparse", "itemsize", "layout", "len", "names"}
    | {"ndim", "ndimension", "nelement", "numel", "shape", "size"}
)
"""What a tensor knows without looking at its values."""


def register(names: str, handler: Handler) -> None:
    """Note how functions are computed by shards.

    Args:
        names: of functions, with spaces between them.
    """
    _handlers.update(dict.fromkeys(names.split(), handler))


class Sharded(Tensor):
    """A tensor of which each shard has a part: all of the same shape.

    Attributes:
        parts: of the shards on this worker.
        cut_dim: the dimension that is cut; not negative.
        blocks: lie in that dimension one behind the other, and each of them is cut.
    """

    parts: list[Tensor]
    place: Place
    cut_dim: int
    blocks: int

    @staticmethod
    def of(parts: Sequence[Tensor], place: Place, dim: int, blocks: int = 1) -> Sharded:
        """Return the tensor that has these parts.

        Args:
            dim: may be negative.
        """
        first = parts[0]
        dim %= first.dim()
        shape = [size * place.num_shards if at == dim else size for at, size in enumerate(first.shape)]
        found = Tensor._make_wrapper_subclass(
            Sharded, shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        found.parts, found.place, found.cut_dim, found.blocks = list(parts), place, dim, blocks
        assert isinstance(found, Sharded)
        return found

    def like(self, parts: Sequence[Tensor], dim: int, blocks: int = 1) -> Sharded:
        """Return another tensor with parts at the same place."""
        return Sharded.of(parts, self.place, dim, blocks)

    @property
    def from_right(self) -> int:
        """The cut dimension, counted from the last one, which is 1."""
        return len(self.parts[0].shape) - self.cut_dim

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = _name_of(func), dict(kwargs or {})
        if not args and "input" in named:
            args = (named.pop("input"),)
        handler = _handlers.get(name)
        if handler is not None:
            check_recorded(args)
            check_recorded(named.values())
            if named.get("out") is not None:
                raise refused(name, "has an argument out")
            if _is_in_place(func) and not isinstance(args[0], Sharded):
                raise refused(name, "writes into an ordinary tensor what each shard has a part of")
            return handler(func, args, named)
        if name == "attribute requires_grad":
            return args[0].parts[0].requires_grad
        if name == "is_contiguous":
            return args[0].parts[0].is_contiguous(*args[1:], **named)
        if name in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        raise refused(name, "is not known to leave the cut dimension alone")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise refused(str(func), "is not known to leave the cut dimension alone")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Sharded({tuple(self.shape)}, dimension {self.cut_dim} in {self.place.num_shards} shards)"


def refused(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} cannot be computed shard by shard: it {why}. Its argument comes out of a layer that "
        "unisono.parallelize has cut by columns; up to the layer that is cut by rows, the model may use functions that "
        "work on each value, or on each head, by itself. unisono.whole(x) gives every shard the whole tensor"
    )


def check_recorded(values: Iterable[Any]) -> None:
    """Check that no tensor in shards comes out of a function that knows nothing of shards, and would lose gradients.

    Raises:
        UsageError: one does.
    """
    for value in values:
        if isinstance(value, Sharded):
            with torch._C.DisableTorchFunctionSubclass():
                maker = value.grad_fn
            if maker is not None:
                raise refused(
                    maker.name(),
                    "is no function of torch, or is checkpoint with use_reentrant=True, and would lose its gradients",
                )


def whole(value: Tensor) -> Tensor:
    """Return a value that is in shards as an ordinary tensor, which all processes of a group have.

    Of a layer that `unisono.parallelize` has cut by columns each shard has a part of the output. Most models hand it on
    to a layer that is cut by rows; this is for those that need all of it at once. Collective within a group; the
    gradient goes back to the shards.

    Args:
        value: any other tensor is returned as it is.
    """
    if not isinstance(value, Sharded):
        return value
    check_recorded([value])
    return put_together(value.place, value.parts, value.cut_dim, value.blocks)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function as it is registered: of ``__add__`` add, of an attribute its name."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = func.__self__.__name__  # type: ignore[attr-defined]
        return "attribute requires_grad" if name == "requires_grad" else name
    return name.strip("_") if name.startswith("__") else name


def _is_in_place(func: Callable[..., Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")
