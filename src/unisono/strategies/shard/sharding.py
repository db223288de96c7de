"""An optimizer whose states are distributed over the workers: the first stage of ZeRO (Rajbhandari et al., 2020).

`shard` turns an optimizer into one of a subclass of its class, so that schedulers and a GradScaler find what they look
for. The state of a parameter is on its owners (`unisono.core.ownership`), which compute its update;
`unisono.strategies.shard.update` brings the new values to all. What every worker knows of every state is its `Outline`:
all but the content of its tensors.

Every worker sees all parameters, which may lie in memory that the workers of a host share
(`unisono.strategies.shard.hosting`). Every worker gets all gradients, unless they are to go to the owners only
(`unisono.strategies.shard.owner_routing`).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.core.errors import UsageError
from unisono.core.ownership import MemberPlace, Owners, owners
from unisono.engine.rounds.apart import forget_loop, note_loop
from unisono.engine.rounds.life import Rounds
from unisono.strategies.shard.hosting import HostMemory
from unisono.strategies.shard.separable import check_separable, is_plain, unhooked

__all__ = ["Outline", "ShardedOptimizer", "Shares", "shard"]

O = TypeVar("O", bound=Optimizer)  # noqa: E741
Outline = dict[str, tuple[Any, ...]]
"""Of the state of one parameter, by key: ``("tensor", dtype, shape, strides, whether it is on the parameter's device)``
or ``("value", value)``. Plain data."""


class Shares:
    """What this worker has of a sharded optimizer's states, and what it knows of the others'.

    Attributes:
        copies: workers that shall hold each state.
        memory: where this worker writes parameters for the workers of its host; None: each has a copy of its own.
        together: the members that have one copy of the parameters a host, as the newest of them knows. Equal on all.
        to_owners: whether the gradient of a parameter goes to its owners only.
        rounds: of the newest training loop; None before the first.
        owners: by parameter; None: whoever has a state holds it, nothing was shared out yet. Equal on all members.
        whole: while there are no owners, the workers that hold all states, as far as they are members.
        outlines: by parameter, in the order in which their states were made; equal on all members.
        stateless: parameters that an update has left without a state, as far as this member has seen it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Optimizer], object],
        copies: int,
        *,
        by_host: bool = False,
        to_owners: bool = False,
    ) -> None:
        self.copies = copies
        self.memory = HostMemory() if by_host else None
        self.together: tuple[str, ...] = ()
        self.to_owners = to_owners
        self.rounds: Rounds | None = None
        self.owners: Owners | None = None
        self.whole: tuple[str, ...] = ()
        self.outlines: dict[int, Outline] = {}
        self.stateless: set[int] = set()
        self._optimizer = optimizer
        self._step = step
        self._known: list[Tensor] = []
        self._seen: dict[int, list[Any]] = {}
        """By parameter: the values of a state whose outline is known."""
        self._play: Callable[[], None] | None = None
        self.begin_whole()

    # -- the run -------------------------------------------------------------------------------------

    def bind(self, play: Callable[[], None], rounds: Rounds) -> None:
        """Have ``play`` do the updates, in a training loop."""
        self._play, self.rounds = play, rounds
        if self.to_owners:
            note_loop(self, rounds, lambda one: any(one is each for each in self.parameters()))

    def unbind(self) -> None:
        """Note that the training loop is over."""
        self._play = None
        forget_loop(self)
        if self.memory is not None:
            self.memory.close()

    @property
    def is_whole(self) -> bool:
        """Whether all states are here."""
        return set(self.outlines).issubset(self.here())

    def update(self) -> None:
        """Make one step. Collective within a training loop.

        Raises:
            UsageError: outside of a training loop, and this worker does not hold all states.
        """
        if self._play is not None:
            self._play()
            return
        if not self.is_whole:
            raise UsageError(
                f"{type(self._optimizer).__name__}.step() was called outside of run.steps, and the states of this "
                "optimizer are distributed over the workers (unisono.shard): call it within the loop"
            )
        self.update_own(range(len(self.parameters())))
        self.begin_whole()

    def _members(self) -> Collection[str]:
        return self.rounds.team.worker_ids if self.rounds is not None else ()

    def members_of(self, worker_ids: Sequence[str]) -> tuple[str, ...]:
        """Return those of some workers that are members; all, outside of a training loop."""
        ids = self._members()
        return tuple(one for one in worker_ids if one in ids or not ids)

    @property
    def is_settled(self) -> bool:
        """Whether each parameter has owners. Equal on all members."""
        return self.owners is not None and len(self.owners) == len(self.parameters())

    @property
    def holders(self) -> Owners:
        """By parameter: the members that hold its state; () where it has none."""
        table = self.owners if self.owners is not None else (self.whole,) * len(self.parameters())
        return tuple(self.members_of(each) if index in self.outlines else () for index, each in enumerate(table))

    # -- parameters and their updates ----------------------------------------------------------------

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of ``param_groups``.

        Raises:
            UsageError: they are others than before.
        """
        found = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if any(before is not now for before, now in zip(self._known, found, strict=False)) or len(found) < len(
            self._known
        ):
            raise UsageError(
                f"the param_groups of a sharded {type(self._optimizer).__name__} have different parameters from "
                "before, or in a different order; parameters may only be added, with add_param_group()"
            )
        self._known = found
        return found

    def sizes(self) -> list[int]:
        """Return by parameter what its owners have to do: its bytes; 0 where it is frozen and has no state."""
        return [
            parameter.nbytes if parameter.requires_grad or index in self.outlines else 0
            for index, parameter in enumerate(self.parameters())
        ]

    def to_update(self) -> list[int]:
        """Return the parameters that have a gradient."""
        return [index for index, parameter in enumerate(self.parameters()) if parameter.grad is not None]

    def update_own(self, own: Collection[int]) -> None:
        """Update these parameters only. Local.

        Raises:
            UsageError: the optimizer keeps a state that does not belong to one parameter.
        """
        parameters = self.parameters()
        aside = [
            (parameter, parameter.grad)
            for index, parameter in enumerate(parameters)
            if parameter.grad is not None and index not in own
        ]
        for parameter, _ in aside:
            parameter.grad = None
        try:
            self._step(self._optimizer)
        finally:
            for parameter, gradient in aside:
                parameter.grad = gradient
        places = set(map(id, parameters))
        if strange := [key for key in self._optimizer.state if id(key) not in places]:
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps state that belongs to no parameter ({strange[0]!r}), so it "
                "cannot be distributed: use it without unisono.shard"
            )

    def options(self) -> list[dict[str, Any]]:
        """Return the options of all groups, without parameters."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]

    # -- states --------------------------------------------------------------------------------------

    def begin_whole(self) -> None:
        """Note that all members hold all states, as before the first loop. Local."""
        self.owners, self.whole = None, tuple(self._members())
        self.stateless.clear()
        self._seen.clear()
        self.outlines = self.changes(range(len(self.parameters())), {})

    def changes(self, own: Iterable[int], known: Mapping[int, Outline] | None = None) -> dict[int, Outline]:
        """Return the outlines of some states, where they are not those that are known.

        Args:
            known: default: `outlines`.
        """
        known = self.outlines if known is None else known
        parameters, found = self.parameters(), {}
        for index in own:
            state = self._optimizer.state.get(parameters[index])
            if state is None:
                continue
            values, before = list(state.values()), self._seen.get(index)
            if before is not None and index in known and _same_objects(values, before):
                continue  # as usual: an update writes into the tensors of a state
            if (outline := _outline(state, parameters[index], index)) != known.get(index):
                found[index] = outline
            else:
                self._seen[index] = values
        return found

    def note(self, changes: Mapping[int, Outline]) -> None:
        """Add outlines of an update; those of new states in the order of the parameters."""
        self.outlines.update(sorted(changes.items()))
        self.stateless -= changes.keys()

    def held(self) -> dict[int, dict[str, Tensor]]:
        """Return by parameter the tensors of the states that are here."""
        state, parameters = self._optimizer.state, self.parameters()
        return {
            index: {key: value for key, value in state[parameters[index]].items() if isinstance(value, Tensor)}
            for index in self.here()
        }

    def here(self) -> list[int]:
        """Return the parameters whose states are here. Reading another state makes an empty one, which is none."""
        state = self._optimizer.state
        return [
            index for index, parameter in enumerate(self.parameters()) if index in self.outlines and parameter in state
        ]

    def state(self, index: int) -> dict[str, Any]:
        """Return a state that is here, with its keys in the order of its outline."""
        held = self._optimizer.state[self.parameters()[index]]
        return {key: held[key] for key in self.outlines[index]}

    def made(self, index: int) -> dict[str, Any]:
        """Return a state as its outline says, with tensors of arbitrary content."""
        parameter = self.parameters()[index]
        return {key: _made(part, parameter.device) for key, part in self.outlines[index].items()}

    def placeholder(self, index: int) -> dict[str, Any]:
        """Return a state as its outline says, with meta tensors."""
        return {key: _made(part) for key, part in self.outlines[index].items()}

    def put(self, index: int, state: dict[str, Any]) -> None:
        """Hold a state."""
        self._optimizer.state[self.parameters()[index]] = state

    def keep(self, own: Collection[int]) -> None:
        """Drop all states but these."""
        self._seen.clear()
        for index, parameter in enumerate(self.parameters()):
            if index not in own:
                self._optimizer.state.pop(parameter, None)


class ShardedOptimizer(Optimizer):
    """Mixin: a tracked optimizer of which this worker holds some states; see `unisono.engine.state.spread.Spread`."""

    _base: ClassVar[type[Optimizer]]
    _shares: Shares

    def _sharded_step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise UsageError(
                f"a sharded {type(self).__name__} takes no closure: it would compute a loss on this worker only"
            )
        if getattr(self, "grad_scale", None) is not None:
            raise UsageError(
                f"a sharded {type(self).__name__} with fused=True does not divide by the scale of a GradScaler itself: "
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        self._shares.update()

    # With torch's hooks around the whole of it: a hook before a step finds old parameters, one after it new ones.
    step = Optimizer.profile_hook_step(_sharded_step)  # type: ignore[arg-type,assignment]
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def is_spread(self) -> bool:
        return True

    @property
    def holders(self) -> Owners:
        """By parameter: the ids of the members that hold its state; () where it has none yet."""
        return self._shares.holders

    def unit(self, path: str) -> int | None:
        """Return the parameter whose state has the tensor at a path of `state_dict`."""
        found = re.match(r"\['state'\]\[(\d+)\]", path)
        return int(found[1]) if found is not None else None

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the replicated optimizer; what this worker does not hold is a meta tensor."""
        found = super().state_dict()
        shares, own = self._shares, found["state"]
        if shares.owners is not None or any(index not in own for index in shares.outlines):
            found["state"] = {
                index: own[index] if index in own else shares.placeholder(index) for index in shares.outlines
            }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the ``state_dict`` of a replicated or a sharded optimizer; a meta tensor stands for a state elsewhere.

        Then nothing is shared out yet: whoever has a state holds it, until the next update or training loop. With what
        `outline` has returned, take part as a member that holds no state yet.
        """
        if "outlines" in state_dict:
            self._load_outline(state_dict)
            return
        states = state_dict["state"]
        away = {index for index, state in states.items() if any(_is_meta(value) for value in state.values())}
        super().load_state_dict(
            {**state_dict, "state": {index: state for index, state in states.items() if index not in away}}
        )
        shares = self._shares
        shares.begin_whole()
        where = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        shares.outlines = {
            index: _outline_of_placeholder(state, index, *where[index]) if index in away else shares.outlines[index]
            for index, state in states.items()
        }

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy or pickle it as the optimizer that it was, which has no part in a run."""
        if not self._shares.is_whole:
            raise UsageError(
                f"a sharded {type(self).__name__} was copied or pickled, but some of its states are on other workers: "
                "let the run write a checkpoint (run.save), or copy the optimizer before the training"
            )
        return _new, (self._base,), self.__getstate__()

    def load_shares(self, state: dict[str, Any], holders: Mapping[int, tuple[str, ...]]) -> None:
        """Load a `state_dict`; the next training loop finds out who has which state. Local."""
        self.load_state_dict(state)

    def plan(self, members: Sequence[MemberPlace]) -> dict[int, tuple[str, ...]]:
        """Return who is to hold which state when the next training loop begins, where nobody holds any yet. Local.

        Args:
            members: in the order of their ranks.
        """
        return dict(enumerate(owners(self._shares.sizes(), members, self._shares.copies)))

    def outline(self) -> dict[str, Any]:
        """Return all but the content of tensors: what a newcomer needs to take part."""
        shares = self._shares
        return {
            "param_groups": super().state_dict()["param_groups"],
            "owners": shares.owners,
            "whole": shares.members_of(shares.whole) if shares.owners is None else (),
            "outlines": dict(shares.outlines),
            "together": shares.together,
        }

    def held(self) -> dict[int, dict[str, Tensor]]:
        """Return by parameter the tensors of the states that this worker holds."""
        return self._shares.held()

    def _load_outline(self, outline: dict[str, Any]) -> None:
        super().load_state_dict({"param_groups": outline["param_groups"], "state": {}})
        self._shares.owners, self._shares.whole = outline["owners"], outline["whole"]
        self._shares.outlines = dict(outline["outlines"])
        self._shares.together = outline["together"]


def shard(
    optimizer: O,
    *,
    copies: int = 2,
    parameters: Literal["worker", "host"] = "worker",
    gradients: Literal["worker", "owners"] = "worker",
) -> O:
    """Share out the states of an optimizer over the workers: each is on ``copies`` of them, and not on all.

    Returns the same object. The training has the same bits as without, also its checkpoints; what changes is the memory
    of a worker (for AdamW of P parameters, R copies and W workers 8 P R / W bytes instead of 8 P) and the time that the
    update takes. A parameter is never cut. Up to ``copies - 1`` workers may be lost at the same time; after a loss, and
    when a worker joins, states move after the next update. Within a training loop ``optimizer.step()`` is collective;
    all workers must call it alike.

    ::

        optimizer = unisono.shard(torch.optim.AdamW(model.parameters(), lr=1e-3), copies=2)
        run.track(model=model, optimizer=optimizer)

    The method is ZeRO's first stage (Rajbhandari et al., 2020), with whole parameters.

    Args:
        optimizer: whose update of a parameter depends on this parameter, its gradient and its state only: those of
            ``torch.optim`` but LBFGS and SparseAdam, and others that pass a trial on small parameters.
        copies: workers that hold each state, on different hosts where there are several. 1: the loss of a worker ends
            the run, which goes on from its newest checkpoint.
        parameters: who has a copy of the parameters: each ``"worker"``, or each ``"host"``, whose workers map one piece
            of memory. For P bytes of parameters a host then needs 2 P instead of P a worker. CPUs only.
        gradients: who gets the mean gradient of a parameter: each ``"worker"``, or its ``"owners"`` only, with half the
            bytes between hosts. The others find a ``.grad`` that raises when it is read: clip with
            `unisono.clip_grad_norm_`. A gradient is lost with all owners of its parameter.

    Raises:
        UsageError: this optimizer cannot be distributed; says why.
    """
    for what, given, known in (("parameters", parameters, "host"), ("gradients", gradients, "owners")):
        if given not in ("worker", known):
            raise UsageError(f'{what} is "worker" or "{known}"; got {given!r}')
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise UsageError(f"copies is the number of workers that hold each state and must be at least 1; got {copies!r}")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"unisono.shard takes an optimizer of torch.optim, got a {type(optimizer).__qualname__}")
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("this optimizer is already sharded: call unisono.shard once")
    if "step" in vars(optimizer):
        raise UsageError(
            f"the step() of this {type(optimizer).__name__} was replaced before unisono.shard, by a learning rate "
            "scheduler or a wrapper: call unisono.shard right after creating the optimizer, then create the scheduler"
        )
    check_separable(optimizer)
    base = type(optimizer)
    optimizer.__class__ = _sharded_class(base)  # type: ignore[assignment,arg-type]
    sharded = cast(ShardedOptimizer, optimizer)
    sharded._shares = Shares(
        sharded,
        unhooked(base),  # `ShardedOptimizer.step` calls the hooks itself
        copies,
        by_host=parameters == "host",
        to_owners=gradients == "owners",
    )
    return optimizer


@functools.cache
def _sharded_class(base: type[Optimizer]) -> type[ShardedOptimizer]:
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (ShardedOptimizer, base), {**names, "_base": base})


def _new(base: type[Optimizer]) -> Optimizer:
    """Return an optimizer that gets its attributes from a copy."""
    return base.__new__(base)


def _same_objects(now: Sequence[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _outline(state: Mapping[str, Any], parameter: Tensor, index: int) -> Outline:
    return {
        key: _part(
            value, value.device == parameter.device if isinstance(value, Tensor) else False, f"state[{index}][{key!r}]"
        )
        for key, value in state.items()
    }


def _outline_of_placeholder(
    state: Mapping[str, Any], index: int, options: Mapping[str, Any], parameter: Tensor
) -> Outline:
    """Return the outline of a state that ``load_state_dict`` of torch would load with these options of its group."""
    steps_on_cpu = parameter.device.type != "cpu" and not (options.get("capturable") or options.get("fused"))
    return {
        key: _part(value, not (key == "step" and steps_on_cpu), f"state[{index}][{key!r}]")
        for key, value in state.items()
    }


def _part(value: object, is_beside: bool, path: str) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return ("tensor", kind, tuple(value.shape), value.stride(), is_beside)
    if is_plain(value):
        return ("value", value)
    raise UsageError(
        f"{path} of an optimizer is a {type(value).__qualname__}; unisono.shard can distribute only states of tensors "
        "and plain numbers: use this optimizer without it"
    )


def _made(part: tuple[Any, ...], device: torch.device | None = None) -> Any:
    """Return a tensor of arbitrary content, or a plain value.

    Args:
        device: of the parameter; None: a meta tensor.
    """
    if part[0] == "value":
        return part[1]
    _, kind, shape, strides, is_beside = part
    where = "meta" if device is None else device if is_beside else "cpu"
    return torch.empty_strided(shape, strides, dtype=getattr(torch, kind), device=where)
