"""What the run asks of a tracked optimizer whose states are shared out over the workers (`unisono.shard`).

Every worker has the parameters. The state of a parameter (momentum, second moments) lies on a few workers, its
**holders**; the parameter is the smallest unit, because many updates give other bits where a parameter is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from unisono.core.ownership import Place
from unisono.engine.state.packing import digest_of_tensor, pack_held

__all__ = ["Sharded", "held_digests", "states_in"]


@runtime_checkable
class Sharded(Protocol):
    """A tracked optimizer of which this worker holds some states."""

    @property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """By parameter, in the order of ``param_groups``: the ids of the workers that hold its state.

        Equal on all members of a generation; () for a parameter that has no state yet.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the replicated optimizer, in which each tensor that this worker does not hold is
        a meta tensor of its dtype and shape. Everything but the content of tensors is equal on all members. Local.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the ``state_dict`` of a replicated or of a sharded optimizer, and keep the tensors that it has. Local.

        A meta tensor stands for a state that this worker does not hold.
        """

    def plan(self, members: Sequence[Place]) -> tuple[tuple[str, ...], ...]:
        """Return by parameter who is to hold its state when the next training loop begins, where nobody holds any yet.

        So a member that loads a checkpoint knows what to read of it. The loop finds out by itself who has loaded what,
        and moves what should be elsewhere.

        Args:
            members: in the order of their ranks.
        """

    def outline(self) -> dict[str, Any]:
        """Return everything of the state but the content of tensors: what a newcomer needs to take part. Local.

        Equal on all members.
        """

    def load_outline(self, outline: dict[str, Any]) -> None:
        """Take part as a member that holds no state yet. Local."""

    def held(self) -> dict[int, dict[str, Tensor]]:
        """Return, by parameter, the tensors of the states that this worker holds. Local."""


def states_in(paths: Sequence[str], optimizer: str) -> Iterator[tuple[int, int]]:
    """Yield the tensors that are states of parameters: (number of the path, number of the parameter).

    Args:
        paths: of the tensors of a state, as `unisono.engine.state.packing.pack` gives them.
        optimizer: the path of the optimizer's ``state_dict``.
    """
    before = f"{optimizer}['state']["
    for number, path in enumerate(paths):
        if path.startswith(before):
            yield number, int(path[len(before) :].partition("]")[0])


def held_digests(state_dict: dict[str, Any]) -> dict[int, int]:
    """Return the digests of the states that this worker holds, by the numbers of their tensors in a ``state_dict``."""
    packed = pack_held(state_dict, "")
    return {
        number: digest_of_tensor(packed.tensors[number])
        for number, _ in states_in(packed.paths, "")
        if not packed.tensors[number].is_meta
    }
