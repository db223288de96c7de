"""Parts of a run's state of which each worker holds some units, and what the run asks of them.

A unit is the smallest part that moves as a whole: the state of a parameter (momentum, second moments) where an
optimizer is shared out over the workers, or that of a replica. Each unit lies on a few workers, its **holders**. How
units come to other holders is the business of the part's strategy (`unisono.engine.rounds.moving`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from unisono.core.ownership import MemberPlace
from unisono.engine.state.packing import digest_of_each, digest_of_tensors, pack_held

__all__ = ["Spread", "digests_of_units", "held_digests", "units_in"]


@runtime_checkable
class Spread(Protocol):
    """A tracked optimizer, or a part of the state of Unisono's own, of which this worker holds some units."""

    @property
    def is_spread(self) -> bool:
        """Whether it is so now; the same on all members."""

    @property
    def holders(self) -> Sequence[tuple[str, ...]]:
        """By unit: the ids of the workers that hold it. Equal on all members; () for a unit that has no state yet."""

    def unit(self, path: str) -> int | None:
        """Return the unit of the tensor at a path within ``state_dict``; None: every worker holds the tensor."""

    def plan(self, members: Sequence[MemberPlace]) -> Mapping[int, tuple[str, ...]]:
        """Return by unit the ids of those who are to hold it when the next training loop begins, where nobody does yet.

        So a member that loads a checkpoint knows what to read of it. The loop finds out by itself who has loaded what,
        and moves what should be elsewhere.

        Args:
            members: in the order of their ranks.
        """

    def state_dict(self) -> Any:
        """Return the whole state; a meta tensor stands for each that this worker does not hold. Local.

        Everything but the content of tensors is equal on all members.
        """

    def outline(self) -> Any:
        """Return what a newcomer needs to take part, which holds no unit yet. Local. Equal on all members."""

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` or `outline` has returned, and keep the units that it has. Local."""

    def load_shares(self, state: Any, holders: Mapping[int, tuple[str, ...]]) -> None:
        """Load what `state_dict` has returned, where all members know who has got which units of it. Local."""


def units_in(part: Spread, paths: Sequence[str], start: str = "") -> Iterator[tuple[int, int]]:
    """Yield the tensors of a part that not all members hold: (number of the path, unit).

    Args:
        paths: of the tensors of a state, as `unisono.engine.state.packing.pack` gives them.
        start: of the paths of the part.
    """
    for number, path in enumerate(paths):
        if path.startswith(start) and (unit := part.unit(path.removeprefix(start))) is not None:
            yield number, unit


def held_digests(part: Spread) -> dict[int, int]:
    """Return the digests of what this worker holds of the units, by the numbers of the tensors in ``state_dict``."""
    held = list(_held(part))
    digests = digest_of_each([tensor for _, _, tensor in held])
    return {number: digest for (number, _, _), digest in zip(held, digests, strict=True)}


def digests_of_units(part: Spread) -> dict[int, int]:
    """Return a digest of each unit that this worker holds, for comparing processes of one version."""
    tensors: dict[int, list[Tensor]] = {}
    for _, unit, tensor in _held(part):
        tensors.setdefault(unit, []).append(tensor)
    return {unit: digest_of_tensors([*held, torch.tensor(unit)]) for unit, held in tensors.items()}


def _held(part: Spread) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the tensors of the units that this worker holds: (number in ``state_dict``, unit, tensor)."""
    packed = pack_held(part.state_dict(), "")
    for number, unit in units_in(part, packed.paths):
        if not packed.tensors[number].is_meta:
            yield number, unit, packed.tensors[number]
