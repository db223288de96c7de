"""States of the replicas of local steps (local SGD, DiLoCo): what each replica has for itself, and what all have alike.

A replica trains for some steps by itself. Between two rounds all replicas have the same parameters and buffers. For
itself a replica keeps the tensors of its optimizers, momentum for instance. Everything else that is tracked (options of
optimizers, schedulers, plain values) is **common**: each replica begins a round with the same, and must end with the
same, whichever worker computes it.

Between two rounds the tracked optimizers have no state, and `Replicas` holds those of the replicas. Within a round the
state of the replica that is computed is in the optimizers, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from unisono.errors import StepError, UsageError
from unisono.state.packing import digest_of_state, from_bytes, to_bytes

__all__ = ["NAME", "Common", "ReplicaState", "Replicas", "check_alike", "common", "give", "restore", "take"]

ReplicaState = dict[str, dict[int, Any]]
"""By optimizer, and by parameter in the order of its ``param_groups``: the state that ``optimizer.state`` has of it."""

NAME: Final = "replicas"
"""Of this part of the run's state."""


class Common:
    """What all replicas have alike at one moment."""

    def __init__(self, content: bytes, digests: dict[str, str]) -> None:
        self.content = content
        """The states by name, as `to_bytes` gives them."""
        self.digests = digests
        """By name."""


class Replicas:
    """The states of the replicas of a run, as far as this worker holds them. A part of the run's state.

    Attributes:
        held: by replica, its state at the beginning of the next round.
        before: by replica, those of the round before, as long as another member may have to compute that round.
    """

    def __init__(self) -> None:
        self.held: dict[int, ReplicaState] = {}
        self.before: dict[int, ReplicaState] = {}
        self._phase = -1
        self._num_replicas = 0

    # -- a part of the run's state -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"phase": self._phase, "replicas": self._num_replicas, "held": dict(sorted(self.held.items()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._phase, self._num_replicas = state["phase"], state["replicas"]
        self.held = {replica: _copied(held) for replica, held in state["held"].items()}
        self.before = {}

    def begin(
        self, optimizers: Mapping[str, torch.optim.Optimizer], phase: int, num_replicas: int, *, keep: bool
    ) -> None:
        """Begin, or go on with, the rounds of a phase.

        Args:
            optimizers: those of the replicas, by name. Their state is that with which each replica begins.
            keep: a replica keeps its state from round to round.
        """
        taken = take(optimizers)
        if phase == self._phase and num_replicas == self._num_replicas:
            return
        self._phase, self._num_replicas, self.before = phase, num_replicas, {}
        self.held = {replica: _copied(taken) for replica in range(num_replicas)} if keep else {}


def take(optimizers: Mapping[str, torch.optim.Optimizer]) -> ReplicaState:
    """Take the state out of the optimizers.

    Raises:
        UsageError: an optimizer has a state that belongs to no parameter.
    """
    taken: ReplicaState = {}
    for name, optimizer in optimizers.items():
        state = {}
        for index, parameter in enumerate(_parameters(optimizer)):
            if parameter in optimizer.state:
                state[index] = optimizer.state.pop(parameter)
        if optimizer.state:
            raise UsageError(
                f"{name} ({type(optimizer).__qualname__}) keeps a state that belongs to no parameter, so it cannot be "
                "given to a replica; use another optimizer within run.local_steps"
            )
        taken[name] = state
    return taken


def give(optimizers: Mapping[str, torch.optim.Optimizer], state: ReplicaState) -> None:
    """Put a state into the optimizers, which have none; the tensors are not copied."""
    for name, optimizer in optimizers.items():
        options = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        for index, value in state.get(name, {}).items():
            parameter, group = options[index]
            counts_there = group.get("capturable") or group.get("fused")
            optimizer.state[parameter] = {
                key: item if key == "step" and not counts_there else _on(item, parameter.device)
                for key, item in value.items()
            }


def common(objects: Mapping[str, Any]) -> Common:
    """Return what all replicas have alike.

    Args:
        objects: everything that is tracked but modules, by name; optimizers without their state.
    """
    states = {name: _plain(value) for name, value in objects.items()}
    digests = {name: f"{digest_of_state(state):016x}" for name, state in states.items()}
    return Common(to_bytes(states, "tracked"), digests)


def restore(objects: Mapping[str, Any], content: bytes) -> None:
    """Put everything that all replicas have alike back to an earlier moment."""
    for name, state in from_bytes(content).items():
        value = objects[name]
        if isinstance(value, torch.optim.Optimizer):
            for group, options in zip(value.param_groups, state, strict=True):
                group.update({key: _like(group.get(key), option) for key, option in options.items()})
        else:
            value.load_state_dict(state)


def check_alike(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Compare what the replicas, by number, have alike.

    Raises:
        StepError: they differ; names the object.
    """
    first = min(digests)
    for replica, found in digests.items():
        for name, digest in found.items():
            if digest != digests[first][name]:
                raise StepError(
                    f"{name} is not the same after the inner steps of replica {replica} as after those of replica "
                    f"{first}. Only parameters, buffers and the state of optimizers may differ between replicas. A "
                    "scheduler that follows the loss, an average of the weights or a counter of the script's own "
                    "belongs after `for step in round`, where round.loss is the loss of all replicas"
                )


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return [{key: option for key, option in group.items() if key != "params"} for group in value.param_groups]
    return value.state_dict()


def _like(now: Any, option: Any) -> Any:
    return option.to(now.device) if isinstance(option, Tensor) and isinstance(now, Tensor) else option


def _on(value: Any, device: torch.device) -> Any:
    """Return a state with its tensors on a device: those of a checkpoint, or of another member, arrive on the CPU."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    return value


def _copied(value: Any) -> Any:
    """Return a copy of a state, whose tensors are copied too."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
