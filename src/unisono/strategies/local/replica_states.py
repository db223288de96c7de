"""States of the replicas of local steps (local SGD, DiLoCo): what each replica has for itself, and what all have alike.

A replica trains for some steps by itself. Between two rounds all replicas have the same parameters and buffers. For
itself a replica keeps the tensors of its optimizers, momentum for instance. Everything else that is tracked (options of
optimizers, schedulers, plain values) is **common**: each replica begins a round with the same, and must end with the
same, whichever worker computes it.

Between two rounds the tracked optimizers have no state, and `Replicas` holds those of the replicas. Within a round the
state of the replica that is computed is in the optimizers, without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from unisono.core.errors import StepError, UsageError
from unisono.core.holdings import copied, holders_of
from unisono.core.ownership import MemberPlace
from unisono.core.plan import plan as even_plan
from unisono.engine.state.packing import Packed, digest_of_state, from_bytes, pack, pack_held, to_bytes, unpack
from unisono.strategies.local.grouping import groups_of

__all__ = [
    "NAME",
    "Common",
    "Header",
    "ReplicaState",
    "Replicas",
    "Shelf",
    "check_alike",
    "common",
    "give",
    "restore",
    "take",
]

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


class Header(msgspec.Struct, frozen=True):
    """Everything of a replica's state but the content of its tensors."""

    skeleton: bytes
    kinds: list[tuple[str, list[int]]]
    """(dtype, shape) of each tensor."""

    @classmethod
    def of(cls, packed: Packed) -> Header:
        return cls(
            packed.skeleton, [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in packed.tensors]
        )

    def made(self, device: str) -> ReplicaState:
        """Return the state with tensors of arbitrary content; meta tensors, on "meta"."""
        tensors = [torch.empty(shape, dtype=getattr(torch, kind), device=device) for kind, shape in self.kinds]
        state: ReplicaState = unpack(self.skeleton, tensors)
        return state


@dataclass
class Shelf:
    """The states of all replicas at one boundary."""

    held: dict[int, ReplicaState] = field(default_factory=dict)
    """By replica: those that this worker holds."""
    headers: dict[int, Header] = field(default_factory=dict)
    """Of all replicas; equal on all members."""
    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By replica, the ids of the workers that hold its state; equal on all members."""

    def take(self, replica: int, *, keeps: bool = False) -> ReplicaState:
        """Take a state that this worker holds; whoever takes it may change its tensors.

        Args:
            keeps: take a copy, and leave the state here.
        """
        state = self.held.pop(replica)
        if keeps:
            self.held[replica] = state
        if not any(state is other for other in self.held.values()):
            return state
        packed = pack(state, "replica").copied()
        own: ReplicaState = unpack(packed.skeleton, packed.tensors)
        return own

    # -- as `engine.rounds.moving.HeldUnits` ------------------------------------------------------------

    def here(self) -> list[int]:
        return sorted(self.held)

    def state(self, replica: int) -> ReplicaState:
        return self.held[replica]

    def made(self, replica: int) -> ReplicaState:
        return self.headers[replica].made("cpu")

    def placeholder(self, replica: int) -> ReplicaState:
        return self.headers[replica].made("meta")

    def put(self, replica: int, state: ReplicaState) -> None:
        self.held[replica] = state


class Replicas:
    """The states of the replicas of a run, as far as this worker holds them. A part of the run's state.

    Attributes:
        num_copies: how many workers are to hold each state.
        now: the states with which the next round begins.
        before: those of the round before, as long as another member may have to compute that round.
    """

    def __init__(self) -> None:
        self.num_copies = 1
        self.now = Shelf()
        self.before = Shelf()

    def begin(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        num_replicas: int,
        worker_ids: Sequence[str],
        *,
        keep: bool,
    ) -> None:
        """Begin a training loop with as many replicas, or go on in one.

        Replicas of an earlier loop go on with their states, unless another training has given the optimizers a state
        since then: with that one each replica begins.

        Args:
            optimizers: those of the replicas, by name.
            worker_ids: of all members.
            keep: replicas have states.
        """
        taken = take(optimizers)
        if len(self.now.headers) == num_replicas * keep and not any(taken.values()):
            return
        self.before = self.now = Shelf()
        if keep:
            every, header = range(num_replicas), Header.of(pack(taken, "replica"))
            self.now = Shelf(
                dict.fromkeys(every, taken), dict.fromkeys(every, header), dict.fromkeys(every, tuple(worker_ids))
            )

    # -- a part of the run's state -------------------------------------------------------------------

    @property
    def is_spread(self) -> bool:
        """Whether each worker holds a part of it."""
        return bool(self.now.headers)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole; a meta tensor stands for each that this worker does not hold."""
        now = self.now
        held = {
            replica: now.held[replica] if replica in now.held else now.placeholder(replica)
            for replica in sorted(now.headers)
        }
        return {"held": held}

    def outline(self) -> dict[str, Any]:
        """Return what a newcomer gets, which holds no state yet."""
        return {
            "headers": msgspec.msgpack.encode(self.now.headers),
            "holders": dict(self.now.holders),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `outline`, or in a checkpoint `state_dict`, has returned."""
        self.before = Shelf()
        if "held" in state:
            self.load_shares(state, {})  # who holds which state is known when all members have loaded theirs
        else:
            headers = msgspec.msgpack.decode(state["headers"], type=dict[int, Header])
            self.now = Shelf({}, headers, {replica: tuple(ids) for replica, ids in state["holders"].items()})

    def load_shares(self, state: dict[str, Any], holders: Mapping[int, tuple[str, ...]]) -> None:
        """Load a `state_dict`, and keep the states of which it has the tensors."""
        self.before = Shelf()
        packed = {replica: pack_held(each, "replica") for replica, each in state["held"].items()}
        self.now = Shelf(
            {
                replica: state["held"][replica]
                for replica, each in packed.items()
                if not any(tensor.is_meta for tensor in each.tensors)
            },
            {replica: Header.of(each) for replica, each in packed.items()},
            dict(holders),
        )

    @property
    def holders(self) -> list[tuple[str, ...]]:
        """By replica: the ids of the workers that hold its state."""
        return [self.now.holders.get(replica, ()) for replica in range(len(self.now.headers))]

    def unit(self, path: str) -> int | None:
        """Return the replica whose state has the tensor at a path of `state_dict`, e.g. ``['held'][2]...``."""
        found = re.match(r"\['held'\]\[(\d+)\]", path)
        return int(found[1]) if found is not None else None

    def plan(self, members: Sequence[MemberPlace]) -> dict[int, tuple[str, ...]]:
        """Return by replica the ids of the workers that will probably compute it, and of those that hold a copy."""
        number, hosts = len(self.now.headers), [one.host for one in members]
        if not number:
            return {}
        grouping = groups_of(even_plan(len(members), number), hosts)
        own = [grouping.replicas(rank) for rank in range(len(members))]
        computed = holders_of(own)
        holders = copied(computed, hosts, self.num_copies)
        return {replica: tuple(members[rank].worker_id for rank in ranks) for replica, ranks in holders.items()}


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
                f"{name} ({type(optimizer).__qualname__}) keeps state that belongs to no parameter, so it cannot be "
                "given to a replica; use a different optimizer within run.local_steps"
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
