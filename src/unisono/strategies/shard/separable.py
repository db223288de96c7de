"""Whether an optimizer updates each parameter by itself, so that its parameters can be distributed.

An optimizer that looks across parameters (a norm of all gradients, a step size for all) would compute other values on a
worker that updates a part of them, without a word. So it is tried: small copies of its parameters are updated together
and one after the other, and must get the same bits.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.core.errors import UsageError
from unisono.engine.state.packing import same_bits

__all__ = ["check_separable", "is_plain", "unhooked"]

ROOM: Final = 4
"""Length of a small copy along each dimension, at most."""
NUM_STEPS: Final = 3
MAX_PARAMETERS: Final = 8
"""Of a group, that are tried."""
REFUSED: Final = {
    torch.optim.LBFGS: "it looks across all parameters and calls a closure for the loss",
    torch.optim.SparseAdam: "it needs sparse gradients, but Unisono sums dense ones",
}


def check_separable(optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer does not update each parameter by itself, or cannot be tried."""
    name = type(optimizer).__name__
    for kind, reason in REFUSED.items():
        if isinstance(optimizer, kind):
            raise UsageError(f"unisono.shard cannot distribute the states of {name}: {reason}")
    if any(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        raise UsageError(
            f"unisono.shard cannot distribute the states of {name}: its train() and eval() change parameters depending "
            "on all states, but a worker has only some of them"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.layout is not torch.strided or torch.nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"unisono.shard got a {name} with a parameter that is sparse or has no shape yet: make it dense, "
                    "or pass one batch through the model first"
                )
    try:
        with torch.random.fork_rng(devices=[]):
            number = len(_parameters(_small(optimizer)))
            together = _trained(_small(optimizer), range(number))
            apart = [_trained(_small(optimizer), [index]) for index in range(number)]
    except Exception as error:
        raise UsageError(
            f"unisono.shard has tried {name} on small parameters, and its step() raised {type(error).__name__}: "
            f"{error}. Only an optimizer whose step() needs gradients alone can be distributed"
        ) from error
    for state in (optimizer.state, together.state):
        if strange := _strange(state):
            raise UsageError(f"unisono.shard cannot distribute the states of {name}: {strange}")
    if not all(_is_same(_of(together, index), _of(one, index)) for index, one in enumerate(apart)):
        raise UsageError(
            f"unisono.shard cannot distribute the states of {name}: it looks across parameters, or draws random "
            "numbers. Small parameters that it updates together get different values from those that it updates one "
            "at a time, so a worker that updates only some of them would get different bits"
        )


def is_plain(value: object) -> bool:
    """Return whether a value of a state, which is no tensor, can be known to all workers."""
    return value is None or isinstance(value, (bool, int, float, str))


def unhooked(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Return a class's step() without torch's hooks around it."""
    step: Any = kind.step
    found: Callable[[Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


def _strange(states: Mapping[Any, Any]) -> str:
    """Return what in the states cannot be distributed; "" if all can."""
    for key, state in states.items():
        if not isinstance(key, Tensor):
            return f"it keeps state that belongs to no parameter ({key!r})"
        for name, value in state.items():
            if not isinstance(value, Tensor) and not is_plain(value):
                return (
                    f"state[...][{name!r}] is a {type(value).__qualname__}, but states can only be tensors and plain "
                    "numbers"
                )
    return ""


def _trained(small: Optimizer, own: Collection[int]) -> Optimizer:
    """Make a few steps in which some parameters have gradients."""
    parameters = _parameters(small)
    step = unhooked(type(small))
    for number in range(NUM_STEPS):
        for index in own:
            parameters[index].grad = _gradient(parameters[index], number, index)
        step(small)
    return small


def _of(small: Optimizer, index: int) -> list[Any]:
    """Return a parameter, its state and the options of all groups."""
    parameter = _parameters(small)[index]
    state = small.state.get(parameter, {})
    options = [group[key] for group in small.param_groups for key in sorted(group) if key != "params"]
    return [parameter, *(state[key] for key in sorted(state)), *options]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _small(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer with a few small parameters, and the beginnings of their states."""
    cuts = {id(one): _cut(one, one.shape).requires_grad_(one.requires_grad) for one in _parameters(optimizer)}
    known = dict(cuts)  # so that an attribute that holds parameters gets the small ones
    small: Optimizer = object.__new__(type(optimizer))
    small.__dict__ = {
        key: collections.OrderedDict() if key.endswith("_hooks") else copy.deepcopy(value, known)
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups")
    }
    small.state = collections.defaultdict(dict)
    small.param_groups = []
    for group in optimizer.param_groups:
        options = {key: copy.deepcopy(value, known) for key, value in group.items() if key != "params"}
        chosen = _chosen(group["params"])
        for whole in chosen:
            if whole in optimizer.state:
                small.state[cuts[id(whole)]] = {
                    key: _cut(value, whole.shape) if isinstance(value, Tensor) else copy.deepcopy(value)
                    for key, value in optimizer.state[whole].items()
                }
        small.param_groups.append({**options, "params": [cuts[id(whole)] for whole in chosen]})
    return small


def _chosen(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a few parameters, of different shapes and dtypes."""
    kinds: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.dim()), []).append(parameter)
    found = [one for rank in range(MAX_PARAMETERS) for each in kinds.values() for one in each[rank : rank + 1]]
    return found[: max(MAX_PARAMETERS, len(kinds))]


def _cut(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return the beginning of a tensor along each dimension; what is not shaped as its parameter stays whole."""
    if tensor.dim() == len(shape):
        tensor = tensor[tuple(slice(0, ROOM) for _ in shape)]
    return tensor.detach().clone()


def _gradient(parameter: Tensor, number: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + 1000 * number + index)
    scale = 1.0 + index  # so that no norm of all is that of one
    return (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.device, parameter.dtype)


def _is_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(_is_equal, a, b))


def _is_equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return same_bits(a, b)
