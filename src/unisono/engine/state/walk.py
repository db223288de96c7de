"""A walk through tracked modules and optimizers, which is repeated only where it would find something else.

torch's own iterators over modules take longer than a step may spend on them, and the parameters are asked for several
times in each step. To see that every module still owns what it owned takes a tenth of that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import nn

__all__ = ["Walk", "same_objects"]


class Walk:
    """Modules and parameters that a walk has found.

    Args:
        modules, optimizers: by name.

    Attributes:
        owners: (name of what is tracked, path in it, module).
        of_modules: the parameters by their names in modules.
        named: by those in modules and in optimizers; a parameter in both has two names.
        parameters: the same with the first of its names, each once.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.owners = [(name, path, module) for name, root in modules.items() for path, module in root.named_modules()]
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
                found += parameters
                found += parameters.values()
            if children := module._modules:
                found += children
                found += children.values()
            found.append(module)  # where it ends
        for name, optimizer in optimizers.items():
            found.append(name)
            for group in optimizer.param_groups:
                found += group["params"]
                found.append(group)
        return found


def same_objects(now: Sequence[object], before: Sequence[object]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))
