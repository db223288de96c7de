"""Sums that a script adds up over the micro-batches: their kinds, and their totals over an epoch.

A sum lies in the tail of the slot, so its name, shape and kind belong to the layout and must be known to all members
before a step begins. The step in which a name is new is the exception: `unisono.engine.rounds.gathering.SumsRound`
collects its values, and from the next step on the name is known. Known names are a part of the state, so a newcomer has
the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import StepError, UsageError
from unisono.core.tree import fold, leaf
from unisono.engine.exchange.flat import Extra
from unisono.system import accelerators
from unisono.system.reading import read

__all__ = ["Sums", "Total", "as_sum", "plain"]

Total = int | float | Tensor
"""A tensor is int64 or float64, on the CPU."""

COUNTS = "sums: counts"
"""The extra that counts, by name, how many micro-batches have added something."""


def as_sum(name: str, value: Any) -> Tensor:
    """Return a copy of a value as an int64 or float64 tensor, where its device adds.

    Raises:
        UsageError: the value is neither a number nor a tensor of real numbers.
    """
    if isinstance(value, Tensor) and not value.is_complex():
        there: Tensor = value.detach().to(accelerators.adds_on(value.device))
        return there.to(torch.float64 if there.is_floating_point() else torch.int64, copy=True)
    if isinstance(value, int):  # bool, too
        return torch.tensor(int(value), dtype=torch.int64)
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # the last one from a complex tensor
        raise UsageError(
            f"step.add takes numbers and tensors of real numbers; {name!r} is a {type(value).__qualname__}"
        ) from None


def plain(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return totals for the journal: numbers, and lists of numbers for tensors."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in totals.items()}


class Sums:
    """Known names of sums, and the totals of each phase's newest epoch. Equal on all members between two steps.

    The totals of phases that are over are kept: a worker that comes later skips them, and reads the totals in between.
    """

    def __init__(self) -> None:
        self._known: dict[str, Extra] = {}
        self._epoch = -1
        self._totals: dict[int, dict[str, Total]] = {}
        self._losses: dict[int, tuple[float, float]] = {}
        """By phase: the sum of weight * loss over the steps of its newest epoch, and that of the weights."""

    # -- the layout ----------------------------------------------------------------------------------

    def extras(self) -> list[Extra]:
        """Return what the slot has room for: the counts, then each sum by name. Empty if no name is known."""
        if not self._known:
            return []
        return [Extra(COUNTS, torch.Size([len(self._known)]), torch.int64), *self._known.values()]

    def fits(self, values: Mapping[str, Tensor]) -> bool:
        """Return whether the layout has room for these sums of a micro-batch."""
        return all(
            (known := self._known.get(name)) is not None
            and known.shape == value.shape
            and known.dtype in (value.dtype, torch.float64)
            for name, value in values.items()
        )

    def write(self, values: Mapping[str, Tensor], views: Sequence[Tensor]) -> None:
        """Write the sums of a micro-batch, for which there is room, to views of zeros in the order of `extras`."""
        for index, name in enumerate(self._known):
            if name in values:
                views[0][index] = 1
                views[1 + index].copy_(values[name])

    def read(self, views: Sequence[Tensor]) -> dict[str, Total]:
        """Return the totals of the names that any micro-batch has added, from views in the order of `extras`."""
        if not self._known:
            return {}
        counts, *totals = read(views)
        added = zip(self._known, counts.tolist(), totals, strict=True)
        return {name: _total(total) for name, count, total in added if count}

    def learn(self, by_leaf: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Total]:
        """Note the names and kinds of all micro-batches' sums; returns their totals, added in the order of the tree.

        Raises:
            StepError: a name has tensors of different shapes.
        """
        names = sorted({name for values in by_leaf.values() for name in values})
        totals: dict[str, Total] = {}
        for name in names:
            given = {index: values[name].cpu() for index, values in by_leaf.items() if name in values}
            first_leaf, first = next(iter(given.items()))
            before = self._known.get(name)
            for index, value in given.items():
                if value.shape != first.shape or (before is not None and value.shape != before.shape):
                    other = first.shape if before is None else before.shape
                    raise StepError(
                        f"step.add({name}=...) got a tensor of shape {tuple(value.shape)} in micro-batch {index}, and "
                        f"one of shape {tuple(other)} "
                        f"{'before' if before is not None else f'in micro-batch {first_leaf}'}: a sum has one shape"
                    )
            dtypes = {value.dtype for value in given.values()} | ({before.dtype} if before is not None else set())
            dtype = torch.float64 if torch.float64 in dtypes else torch.int64
            self._known[name] = Extra(name, first.shape, dtype)
            zero = torch.zeros(first.shape, dtype=dtype)
            leaves = {leaf(i, len(by_leaf)): given.get(i, zero).to(dtype) for i in range(len(by_leaf))}
            totals[name] = _total(fold(leaves, len(by_leaf), torch.add))
        self._known = dict(sorted(self._known.items()))
        return totals

    # -- totals --------------------------------------------------------------------------------------

    def zeros(self) -> dict[str, Total]:
        """Return a zero for each known name."""
        return {name: _total(torch.zeros(extra.shape, dtype=extra.dtype)) for name, extra in self._known.items()}

    def totals(self, phase: int) -> dict[str, Total]:
        """Return the totals over the steps that are done, of the newest epoch of a phase."""
        return dict(self._totals.get(phase, {}))

    def loss(self, phase: int) -> float:
        """Return the mean loss over the steps that are done, of the newest epoch of a phase; NaN if none is."""
        weighted, weight = self._losses.get(phase, (math.nan, 1.0))
        return weighted / weight if weight else math.nan

    def note_loss(self, loss: float, weight: float, phase: int, epoch: int) -> None:
        """Add the loss of a step, before its totals; one of weight 0 may be anything."""
        before = self._losses.get(phase, (0.0, 0.0)) if epoch == self._epoch else (0.0, 0.0)
        self._losses[phase] = (before[0] + (weight * loss if weight else 0.0), before[1] + weight)

    def begin_step(self, phase: int, epoch: int) -> dict[str, Total]:
        """Begin to count a step of this epoch; returns the totals without it."""
        before = self._totals.get(phase, {}) if epoch == self._epoch else {}
        self._epoch = epoch
        return before

    def note(self, before: Mapping[str, Total], totals: Mapping[str, Total], phase: int) -> None:
        """Note the totals of a step, of its passes so far.

        Args:
            before: of the epoch without this step.
        """
        if totals:
            zeros = self.zeros()
            self._totals[phase] = {name: before.get(name, zeros[name]) + value for name, value in totals.items()}

    # -- a part of the state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "known": [(name, list(extra.shape), extra.dtype) for name, extra in self._known.items()],
            "epoch": self._epoch,
            "totals": {phase: dict(totals) for phase, totals in self._totals.items()},
            "losses": dict(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = {name: Extra(name, torch.Size(shape), dtype) for name, shape, dtype in state["known"]}
        self._epoch = state["epoch"]
        self._totals = {phase: dict(totals) for phase, totals in state["totals"].items()}
        self._losses = dict(state["losses"])


def _total(value: Tensor) -> Total:
    return value.cpu().clone() if value.dim() else value.item()
