"""The parts of the state that belong to stages: each worker has those of its own stages.

A unit (`unisono.engine.state.spread`) is a section of `unisono.strategies.stages.module.Stages`: its parameters and
buffers, and what optimizers keep of its parameters. It is held by all workers of the parts that carry it. Tensors of
other sections are meta tensors, everywhere.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.core.ownership import MemberPlace
from unisono.engine.rounds.team import Team
from unisono.strategies.stages.module import Stages

__all__ = ["SpreadModule", "SpreadOptimizer", "drop_elsewhere"]


class _OfStages(ABC):
    """What both kinds have in common."""

    is_spread = True

    def __init__(self, stages: Stages, team: Team) -> None:
        self._stages = stages
        self._team = team

    @property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """By section: the ids of the members that hold it."""
        members = list(zip(self._team.worker_ids, self._team.parts, strict=True))
        parts_with = [self._stages.parts_with(section) for section in range(self._stages.num_sections)]
        return tuple(tuple(worker for worker, part in members if part in parts) for parts in parts_with)

    def plan(self, members: Sequence[MemberPlace]) -> Mapping[int, tuple[str, ...]]:
        """Return by section the ids of those who are to hold it."""
        ids = {one.worker_id for one in members}
        return {section: tuple(one for one in each if one in ids) for section, each in enumerate(self.holders)}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def outlined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with meta tensors in the place of those that belong to sections."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def outline(self) -> dict[str, Any]:
        return self.outlined(self.state_dict())

    def load_shares(self, state: dict[str, Any], holders: Mapping[int, tuple[str, ...]]) -> None:
        self.load_state_dict(state)


class SpreadModule(_OfStages):
    """A tracked module that is, or contains, a `Stages`."""

    def __init__(self, module: nn.Module, path: str, section_of: Mapping[int, int], stages: Stages, team: Team) -> None:
        """
        Args:
            path: of the stages in the module.
            section_of: by id of a parameter.
        """
        super().__init__(stages, team)
        self._module = module
        self._start = f"{path}." if path else ""
        self._section_of = {
            f"{self._start}{name}": section_of[id(one)] for name, one in stages.named_parameters(remove_duplicate=False)
        }

    def unit(self, path: str) -> int | None:
        key = path[2:-2]  # of ['key']
        if key in self._section_of:
            return self._section_of[key]
        found = re.match(rf"{re.escape(self._start)}(\d+)\.", key)
        return self._stages.section(self._stages.stage_of(int(found[1]))) if found is not None else None

    def state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def outlined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with meta tensors in the place of those that belong to sections."""
        return type(state)((key, _meta(value) if self._is_apart(key) else value) for key, value in state.items())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()
        self._module.load_state_dict(
            {key: own[key] if _is_meta(value) or _is_meta(own.get(key)) else value for key, value in state.items()}
        )

    def _is_apart(self, key: str) -> bool:
        return self.unit(f"[{key!r}]") is not None


class SpreadOptimizer(_OfStages):
    """A tracked optimizer of parameters of stages.

    A parameter that is elsewhere gets a gradient that is a meta tensor. With the first one the optimizer makes its
    state, of meta tensors; then there is nothing to do for it (`drop_elsewhere`).
    """

    def __init__(self, optimizer: Optimizer, section_of: Mapping[int, int], stages: Stages, team: Team) -> None:
        """
        Args:
            section_of: by id of a parameter.
        """
        super().__init__(stages, team)
        self._optimizer = optimizer
        self._section_of = section_of

    def _parameters(self) -> list[Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def unit(self, path: str) -> int | None:
        found = re.match(r"\['state'\]\[(\d+)\]\['(\w+)'\]", path)
        if found is None:
            return None
        return self._section_of.get(id(self._parameters()[int(found[1])]))

    def state_dict(self) -> dict[str, Any]:
        parameters, found = self._parameters(), self._optimizer.state_dict()
        states = {
            index: {key: _meta(value) for key, value in each.items()} if parameters[index].is_meta else each
            for index, each in found["state"].items()
        }
        return {**found, "state": states}

    def outlined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with meta tensors in the place of those that belong to sections."""
        return {**state, "state": {index: self._outline(index, each) for index, each in state["state"].items()}}

    def _outline(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value if self.unit(f"['state'][{index}]['{key}']") is None else _meta(value)
            for key, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. What is not in it and belongs here has arbitrary content until `load_shares`."""
        parameters = self._parameters()
        found = {
            index: {key: _made(value, parameters[index]) for key, value in each.items()}
            for index, each in state["state"].items()
        }
        self._optimizer.load_state_dict({**state, "state": found})


def drop_elsewhere(optimizer: Optimizer, *_: Any) -> None:
    """Drop the gradients of parameters that are on other workers, before an update, where there is nothing to do."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_meta and parameter.grad is not None:
                state = optimizer.state.get(parameter)
                if state and all(isinstance(value, Tensor) for value in state.values()):
                    parameter.grad = None


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _made(value: Any, parameter: Tensor) -> Any:
    """Return a value of a state for a parameter: with memory, if the parameter is here."""
    if _is_meta(value) and not parameter.is_meta:
        return torch.empty_like(value, device=parameter.device)
    return value
