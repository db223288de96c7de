"""Search for the micro-batch that has made a gradient infinite or not a number.

After the sum of a step every member looks at it: one pass over memory, which costs little. The loss of each
micro-batch was finite (`unisono.microbatch.losses` has looked), so the gradient alone went wrong. Only then, once in a
run, each member computes its micro-batches of the step again, apart from all sums, until it finds the first whose
gradient is not finite. The parameters are still those of the step, so the same numbers come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.exchange.flat import Slot

__all__ = ["Finiteness", "NotFinite", "is_finite"]


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """What a member has found in a step whose gradient is not finite."""

    step: int
    """Of the run."""
    microbatch: int
    """The first of this member's micro-batches whose gradient is not finite; -1: there is none."""
    samples: Sequence[int] = ()
    parameters: Sequence[str] = ()
    """Whose gradients are not finite there; the last one is the nearest to the loss."""
    num_parameters: int = 0
    """How many these are of how many there are."""


class Finiteness:
    """Looks at the gradients of a run, until one was not finite.

    Args:
        report: receives what was found, once.
    """

    def __init__(self, report: Callable[[NotFinite], None]) -> None:
        self._report = report
        self._is_over = False

    def is_broken(self, summed: Slot) -> bool:
        """Return whether this is the first gradient of the run that is not finite. Cheap where it is finite."""
        return not self._is_over and not is_finite(summed)

    def report(self, found: NotFinite) -> None:
        self._is_over = True
        self._report(found)


def is_finite(slot: Slot) -> bool:
    """Return whether all gradients of a slot are finite."""
    for piece in slot.layout.pieces(0, slot.layout.tail_row):
        values = slot.typed(piece.dtype)[piece.start : piece.stop]
        # A sum is finite only if all of its terms are. It is infinite without that only if it overflows.
        if not math.isfinite(float(values.sum())) and not bool(torch.isfinite(values).all()):
            return False
    return True
