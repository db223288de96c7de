"""Gradients that are summed and not applied yet: with ``run.steps(delay=D)``, those of the last D steps.

Between two steps they are a part of the run's state, as parameters and momentum are: newcomers and checkpoints get
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.state.sums import Total

__all__ = ["NAME", "Gradient", "Pending"]

NAME: Final = "pending"
"""Of this part of the run's state."""


@dataclass
class Gradient:
    """The mean gradient of a step, and what else its micro-batches have added up."""

    number: int
    """Of the step within ``run.steps``."""
    digest: int
    totals: dict[str, Total]
    has_new_sums: bool
    """Micro-batches have added sums for which there was no room."""
    gradients: list[Tensor]
    """By trained parameter, in the dtype of the sum."""
    buffers: list[Tensor]
    """The changes of the buffers."""
    used: Tensor
    """(parameters,) int32: how many micro-batches had a gradient of each."""
    scalars: Tensor
    """(2,) float64: the total weight, and the weighted loss."""

    @classmethod
    def of(cls, slot: Slot, number: int, digest: int, totals: dict[str, Total], *, has_new_sums: bool) -> Gradient:
        """Return the gradient that lies in a slot; its tensors are views."""
        return cls(number, digest, totals, has_new_sums, slot.gradients, slot.buffers, slot.used, slot.scalars)

    def to_slot(self, layout: FlatLayout, device: torch.device) -> Slot:
        """Return a slot of its own that holds the gradient.

        Raises:
            ValueError: the layout is of other parameters.
        """
        slot = Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=device))
        ours = [*slot.gradients, *slot.buffers, slot.used, slot.scalars]
        theirs = [*self.gradients, *self.buffers, self.used, self.scalars]
        if [one.shape for one in ours] != [one.shape for one in theirs]:
            raise ValueError("a gradient that is not applied yet has parameters of different shapes")
        for one, other in zip(ours, theirs, strict=True):
            one.copy_(other)
        return slot


class Pending:
    """The gradients that are summed and not applied yet, in the order of their steps. A part of the run's state.

    Attributes:
        loaded: those of the state that was loaded, until a training loop takes them.
        current: returns those of the training loop under way.
    """

    def __init__(self) -> None:
        self.loaded: Sequence[Gradient] = ()
        self.current: Callable[[], Sequence[Gradient]] = tuple

    def take(self) -> Sequence[Gradient]:
        """Return what was loaded, once."""
        taken, self.loaded = self.loaded, ()
        return taken

    def state_dict(self) -> list[dict[str, Any]]:
        return [{**vars(each), "digest": f"{each.digest:016x}"} for each in self.current() or self.loaded]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self.loaded = [Gradient(**{**each, "digest": int(each["digest"], 16)}) for each in state]
