"""How functions of torch are computed by shards, by families that treat the cut dimension alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.strategies.parallel.loss import cross_entropy
from unisono.strategies.parallel.place import cut, spread
from unisono.strategies.parallel.value import Sharded, refused, register

__all__: list[str] = []

Function = Callable[..., Any]
Args = Sequence[Any]
Named = Mapping[str, Any]


def _each_value(func: Function, args: Args, kwargs: Named) -> Any:
    """Of functions that compute each value from those at its position, with broadcasting."""
    if any(one is None for one in args):
        if func.__name__.strip("_") in ("eq", "ne"):  # a comparison with None
            return func.__name__.strip("_") == "ne"
        raise refused(func.__name__, "has an argument None")
    first = _first(args, kwargs)
    parts = _by_shard(func, args, kwargs, first)
    return first.like(parts, parts[0].dim() - first.from_right, first.blocks)


def _choose(func: Function, args: Args, kwargs: Named) -> Any:
    if len(args) < 3:
        raise refused(func.__name__, "asks where values are")
    return _each_value(func, args, kwargs)


def _convert(func: Function, args: Args, kwargs: Named) -> Any:
    """Of conversions to a dtype or a device, or those of another tensor."""
    value, *others = args
    for at, other in enumerate(others):
        if isinstance(other, Tensor):
            others[at : at + 1] = [other.device, other.dtype]
            break
    if not isinstance(value, Sharded):
        return value.to(*others, **kwargs)
    return value.like([part.to(*others, **kwargs) for part in value.parts], value.cut_dim, value.blocks)


def _random(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of functions that draw random numbers for each value: each shard draws its own."""
    first = _first(args, kwargs)
    draws = kwargs.get("training", True)
    parts = _by_shard(func, args, kwargs, first, draws=draws)
    return first.like(parts, first.cut_dim, first.blocks)


def _views(func: Function, args: Args, kwargs: Named) -> Any:
    """Of functions that rearrange dimensions, or pick from those that are not cut."""
    value = _first(args[:1], {})
    index = args[1] if func.__name__ == "__getitem__" else None
    if any(isinstance(one, Tensor | list) for one in (index if isinstance(index, tuple) else (index,))):
        raise refused(func.__name__, "picks by a tensor or a list")
    seen = func(_probe(value), *args[1:], **kwargs)
    if isinstance(seen, Tensor):
        dim = _cut_dim_of(seen, value, func)
        made = value.like([func(part, *args[1:], **kwargs) for part in value.parts], dim, value.blocks)
        if made.shape != seen.shape:
            raise refused(func.__name__, f"does to a part of {tuple(value.shape)} what it does not to the whole")
        return made
    dims = [_cut_dim_of(one, value, func) for one in seen]
    found = [func(part, *args[1:], **kwargs) for part in value.parts]
    return tuple(value.like([each[at] for each in found], dim, value.blocks) for at, dim in enumerate(dims))


def _iterate(func: Function, args: Args, kwargs: Named) -> Iterator[Any]:
    return iter(_views(torch.unbind, (_first(args, kwargs), 0), {}))


def _probe(value: Sharded) -> Tensor:
    """Return a tensor without content that shows where a function puts the cut dimension: no other has a stride."""
    return torch.empty_strided(value.shape, [int(at == value.cut_dim) for at in range(value.dim())], device="meta")


def _cut_dim_of(seen: Tensor, value: Sharded, func: Function) -> int:
    dims = [at for at, stride in enumerate(seen.stride()) if stride == 1 and seen.size(at) == value.size(value.cut_dim)]
    if len(dims) != 1:
        raise refused(func.__name__, f"picks from dimension {value.cut_dim}, which is cut")
    return dims[0]


def _reshape(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of functions that give a tensor another shape, in which the shards lie in one dimension as well."""
    value = _first(args[:1], {})
    if any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        raise refused(func.__name__, "looks at the bytes of another dtype")
    if not value.numel():
        raise refused(func.__name__, f"gives {tuple(value.shape)}, which has no values, another shape")
    shape = list(func(torch.empty(value.shape, device="meta"), *args[1:], **kwargs).shape)
    before = math.prod(value.shape[: value.cut_dim]) * value.blocks
    passed = 1
    for dim, size in enumerate(shape):
        if before % passed == 0 and size % (before // passed * value.place.num_shards) == 0:
            own = [each // value.place.num_shards if at == dim else each for at, each in enumerate(shape)]
            return value.like([part.reshape(own) for part in value.parts], dim, before // passed)
        passed *= size
    raise refused(
        func.__name__,
        f"gives shape {tuple(shape)} to {tuple(value.shape)}, and no dimension of that can be cut into "
        f"{value.place.num_shards} shards as dimension {value.cut_dim} is: the number of heads has to be a multiple of "
        "that, and queries, keys and values of one layer have to be cut as 'columns:3'",
    )


def _reshape_as(func: Function, args: Args, kwargs: Named) -> Any:
    value, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
    return value.reshape(tuple(other.shape))


def _expand(func: Function, args: Args, kwargs: Named) -> Sharded:
    value = _first(args, kwargs)
    seen = func(_probe(value), *args[1:], **kwargs)
    dim = _cut_dim_of(seen, value, func)
    shape = [size // value.place.num_shards if at == dim else size for at, size in enumerate(seen.shape)]
    return value.like([part.expand(shape) for part in value.parts], dim, value.blocks)


def _split(func: Function, args: Args, kwargs: Named) -> Any:
    value = _first(args, kwargs)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % value.dim()
    if dim != value.cut_dim:
        return _views(func, args, kwargs)
    num_shards = value.place.num_shards
    sizes = [one.size(dim) for one in func(torch.empty(value.shape, device="meta"), *args[1:], **kwargs)]
    block = value.size(dim) // value.blocks
    if any(size % block for size in sizes):
        raise refused(
            func.__name__,
            f"splits dimension {dim} of {tuple(value.shape)}, which is cut, into {tuple(sizes)}: a layer whose output "
            f"has {len(sizes)} equal parts has to be cut as 'columns:{len(sizes)}'",
        )
    split = [part.split([size // num_shards for size in sizes], dim) for part in value.parts]
    return tuple(value.like([each[index] for each in split], dim, size // block) for index, size in enumerate(sizes))


def _put_together(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of `torch.cat` and `torch.stack`, in another dimension than the one that is cut."""
    tensors = list(args[0] if args else kwargs["tensors"])
    first = _first(tensors, {})
    is_new = func.__name__ == "stack"
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % (first.dim() + is_new)
    if not is_new and dim == first.cut_dim:
        raise refused(func.__name__, f"puts tensors together in dimension {dim}, which is cut")
    by_tensor = [_prepared(one, first, func) for one in tensors]
    found = [func([each[index] for each in by_tensor], dim=dim) for index in range(len(first.parts))]
    return first.like(found, first.cut_dim + (is_new and dim <= first.cut_dim), first.blocks)


def _along(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of functions that compute along dimensions and keep the shape."""
    value = _first(args, kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None:
        raise refused(func.__name__, "chooses a dimension by itself: give it dim")
    _check_dims(func, [dim], value)
    parts = _by_shard(func, args, kwargs, value)
    return value.like(parts, value.cut_dim, value.blocks)


def _norm(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of norms over the last dimensions, whose weights are the same for all shards."""
    value = _first(args, kwargs)
    shape = kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1]
    _check_dims(func, range(-len(shape), 0), value)
    parts = _by_shard(func, args, kwargs, value)
    return value.like(parts, value.cut_dim, value.blocks)


def _reduce(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of functions that reduce dimensions."""
    value = _first(args, kwargs)
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if given is None or given == ():
        raise refused(func.__name__, "computes with all values, those of other shards as well")
    dims = _check_dims(func, [given] if isinstance(given, int) else given, value)
    parts = [func(part, *args[1:], **kwargs) for part in value.parts]
    gone = 0 if parts[0].dim() == value.dim() else sum(dim < value.cut_dim for dim in dims)
    return value.like(parts, value.cut_dim - gone, value.blocks)


def _multiply(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of products of matrices, where the dimension that is cut counts matrices."""
    first = _first(args, kwargs)
    for one in _tensors(args, kwargs):
        if one.dim() < 2 or (isinstance(one, Sharded) and one.from_right < 3):
            raise refused(func.__name__, f"multiplies matrices of {tuple(one.shape)} that are cut themselves")
    parts = _by_shard(func, args, kwargs, first)
    return first.like(parts, parts[0].dim() - first.from_right, first.blocks)


def _attention(func: Function, args: Args, kwargs: Named) -> Sharded:
    """Of attention by heads: each shard has some of them."""
    queries = _first(args, kwargs)
    for one in _tensors(args, kwargs):
        if isinstance(one, Sharded) and (one.from_right < 3 or one.from_right != queries.from_right):
            raise refused(func.__name__, f"attends with {tuple(one.shape)}, whose dimension {one.cut_dim} is cut")
    draws = bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    parts = _by_shard(func, args, kwargs, queries, draws=draws, has_groups=bool(kwargs.get("enable_gqa")))
    return queries.like(parts, queries.cut_dim, queries.blocks)


# -- the arguments of each shard -------------------------------------------------------------------------------


def _by_shard(
    func: Function, args: Args, kwargs: Named, like: Sharded, *, draws: bool = False, has_groups: bool = False
) -> list[Tensor]:
    """Call a function with the arguments of each shard here.

    Args:
        draws: it draws random numbers.
        has_groups: the dimensions that are cut may have different sizes.
    """
    positional = [_prepared(one, like, func, has_groups=has_groups) for one in args]
    named = {name: _prepared(one, like, func, has_groups=has_groups) for name, one in kwargs.items()}
    seeds = _seeds(like) if draws else None
    found = []
    for index in range(len(like.parts)):
        with _seeded(seeds[index] if seeds is not None else None, like):
            own = {name: each[index] for name, each in named.items()}
            found.append(func(*(each[index] for each in positional), **own))
    return found


def _prepared(value: Any, like: Sharded, func: Function, *, has_groups: bool = False) -> Sequence[Any]:
    """Return an argument by shard here. An ordinary tensor is cut where it is as large as the one that is cut."""
    if isinstance(value, Sharded):
        if value.from_right != like.from_right or value.blocks != like.blocks:
            raise refused(
                func.__name__,
                f"computes with {tuple(value.shape)} and {tuple(like.shape)}, which are cut in other dimensions",
            )
        if value.size(value.cut_dim) != like.size(like.cut_dim) and not has_groups:
            raise refused(func.__name__, f"computes with {tuple(value.shape)} and {tuple(like.shape)}")
        return value.parts
    if not isinstance(value, Tensor):
        return [value] * len(like.parts)
    dim = value.dim() - like.from_right
    if dim < 0 or value.size(dim) == 1:
        return spread(like.place, value)
    return cut(like.place, value, dim, like.blocks)


def _seeds(like: Sharded) -> list[int]:
    """Return a seed for each shard here. All workers draw the same, so their generators go on alike."""
    base = int(torch.randint(1 << 62, ()))
    return [base + shard for shard in like.place.own]


@contextmanager
def _seeded(seed: int | None, like: Sharded) -> Iterator[None]:
    """Return a context with generators of a seed, if there is one, and those of before after it."""
    if seed is None:
        yield
        return
    device = like.parts[0].device
    on_device = (
        {"devices": [device.index or 0], "device_type": device.type} if device.type != "cpu" else {"devices": []}
    )
    with torch.random.fork_rng(**on_device):
        torch.manual_seed(seed)
        yield


def _tensors(args: Args, kwargs: Named) -> Iterator[Tensor]:
    yield from (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))


def _first(args: Args, kwargs: Named) -> Sharded:
    for one in _tensors(args, kwargs):
        if isinstance(one, Sharded):
            return one
    raise refused("this function", "takes a tensor in shards as another argument than its first")


def _check_dims(func: Function, dims: Iterable[int], value: Sharded) -> list[int]:
    found = [dim % value.dim() for dim in dims]
    if value.cut_dim in found:
        raise refused(func.__name__, f"computes along dimension {value.cut_dim} of {tuple(value.shape)}, which is cut")
    return found


def _cross_entropy(func: Function, args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "target"), args, strict=False)) | dict(kwargs)
    return cross_entropy(**given)


EACH_VALUE = [
    *("abs", "neg", "add", "sub", "mul", "div", "true_divide", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp"),
    *("expm1", "log", "log1p", "log2", "sin", "cos", "tanh", "sigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu"),
    *(
        "selu",
        "celu",
        "leaky_relu",
        "softplus",
        "softsign",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "logsigmoid",
        "erf",
    ),
    *("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "masked_fill", "lerp", "addcmul", "addcdiv"),
    *("nan_to_num", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "zeros_like", "ones_like"),
    *("lt", "le", "gt", "ge", "eq", "ne", "logical_not", "logical_and", "logical_or"),
]
"""With ``_`` behind the name, they write into their first argument."""
OPERATORS = "radd iadd rsub isub rmul imul rdiv truediv rtruediv itruediv rpow ipow"

register(" ".join([*EACH_VALUE, *(f"{name}_" for name in EACH_VALUE), OPERATORS]), _each_value)
register("where", _choose)
register("to type_as", _convert)
register("dropout dropout_", _random)
register(
    "transpose swapaxes swapdims permute movedim moveaxis unsqueeze squeeze unbind select getitem narrow mT", _views
)
register("iter", _iterate)
register("view reshape flatten unflatten", _reshape)
register("view_as reshape_as", _reshape_as)
register("expand", _expand)
register("chunk split", _split)
register("cat concat stack", _put_together)
register("softmax log_softmax normalize", _along)
register("layer_norm rms_norm", _norm)
register("sum mean amax amin", _reduce)
register("matmul rmatmul bmm", _multiply)
register("scaled_dot_product_attention", _attention)
register(F.cross_entropy.__name__, _cross_entropy)
