"""A walk through tracked modules and optimizers, which is repeated only where it would find something else.

torch's own iterators over modules take longer than a step may spend on them, and the parameters are asked for several
times in each step. To see that every module still owns what it owned takes a tenth of that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Walk", "buffer_in", "same_objects", "tensors_of_state"]


class Walk:
    """Modules and parameters that a walk has found.

    Args:
        modules, optimizers: by name.

    Attributes:
        owners: (name of what is tracked, path in it, module).
        with_modes: (name, module) of those that are in ``train()`` or ``eval()``: all but frozen ones of TorchScript.
        attributed: the modules and optimizers, by name.
        of_modules: the parameters by their names in modules.
        named: by those in modules and in optimizers; a parameter in both has two names.
        parameters: the same with the first of its names, each once.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.owners = [(name, path, module) for name, root in modules.items() for path, module in root.named_modules()]
        self.with_modes = [
            (".".join(filter(None, (name, path))), module)
            for name, path, module in self.owners
            if hasattr(module, "training")
        ]
        self.attributed: dict[str, nn.Module | torch.optim.Optimizer] = {
            **{".".join(filter(None, (name, path))): module for name, path, module in self.owners},
            **optimizers,
        }
        self.of_modules: list[tuple[str, nn.Parameter]] = [
            (f"{name}.{path}", parameter)
            for name, module in modules.items()
            for path, parameter in module.named_parameters()
        ]
        self.named = [
            *self.of_modules,
            *(
                (f"{name}.{group}.{index}", parameter)
                for name, optimizer in optimizers.items()
                for group, options in enumerate(optimizer.param_groups)
                for index, parameter in enumerate(options["params"])
            ),
        ]
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in self.named:
            found.setdefault(id(parameter), (name, parameter))
        self.parameters = list(found.values())
        self._modules = [module for _, _, module in self.owners]
        self._owned = self._look(modules, optimizers)

    def finds_the_same(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> bool:
        """Return whether another walk would find the same modules and parameters under the same names."""
        return same_objects(self._look(modules, optimizers), self._owned)

    def _look(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> list[object]:
        """Return everything that the names and parameters follow from."""
        found: list[object] = [*modules, *modules.values()]
        for module in self._modules:
            if parameters := module._parameters:
                if isinstance(parameters, dict):  # in TorchScript it is none, and the names of parameters are fixed
                    found += parameters
                found += parameters.values()
            if children := module._modules:
                found += children.keys()
                found += children.values()
            found.append(module)  # where it ends
        for name, optimizer in optimizers.items():
            found.append(name)
            for group in optimizer.param_groups:
                found += group["params"]
                found.append(group)
        return found


def buffer_in(module: nn.Module, name: str) -> Tensor | None:
    """Return a buffer that a module owns; None: it has none of this name. The buffers of a module of TorchScript are in
    no dict.
    """
    try:
        return module._buffers[name]
    except KeyError:
        return None


def tensors_of_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an optimizer's state: (name in the state of a parameter, or name under which the optimizer
    keeps it for itself; tensor).
    """
    for key, state in optimizer.state.items():
        if isinstance(state, Tensor):
            yield str(key), state
        elif isinstance(state, Mapping):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield str(name), value


def same_objects(now: Sequence[object], before: Sequence[object]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))
