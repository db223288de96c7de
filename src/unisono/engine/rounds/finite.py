"""Search for the micro-batch that has made a gradient infinite or not a number.

After the sum of a step every member looks at it. Of a large one it looks at a part: at the gradients of the parameters
that are farthest from the loss, which a value that is not finite reaches wherever backward has met it, and at an eighth
of the others, another one in each step. (One pass over all gradients would take up to 1% of a step. What overflows in
a single weight is found a few steps later, or by the next loss.)

The loss of each micro-batch was finite (`unisono.engine.microbatch.losses` has looked), so the gradient alone went
wrong. Only then, once in a run, each member computes its micro-batches of the step again, apart from all sums, until it
finds the first whose gradient is not finite. The parameters are still those of the step, so the same numbers come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from unisono.core.routes import Ranges, split_rows, within
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Slot

__all__ = ["Finiteness", "NotFinite", "is_finite", "looked_at"]

SMALL_BYTES: Final = 1 << 20
"""Of a sum of this size all is looked at."""
FARTHEST_BYTES: Final = 1 << 18
PARTS: Final = 8


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

    def is_broken(self, summed: Slot, step: int, seen: Sequence[float], here: Ranges) -> bool:
        """Return whether this is the first gradient of the run that is seen not to be finite. Cheap where it is finite.

        Args:
            step: of the run: which part is looked at.
            seen: `sums_of` the rows that are looked at.
            here: the rows that this member has of the sum.
        """
        if self._is_over or all(map(math.isfinite, seen)):
            return False
        return not all(is_finite(summed, rows) for rows in looked_at(summed.layout, step, here))

    def sums_of(self, summed: Slot, step: int, here: Ranges) -> list[Tensor]:
        """Return sums of what is looked at in a step, each (). A sum is finite only if all of its terms are."""
        if self._is_over:
            return []
        return [values.sum() for rows in looked_at(summed.layout, step, here) for values in _gradients(summed, rows)]

    def report(self, found: NotFinite) -> None:
        self._is_over = True
        self._report(found)


def looked_at(layout: FlatLayout, step: int, here: Ranges) -> list[range]:
    """Return the rows of a sum that are looked at in a step. In the rows the last parameter comes first.

    Args:
        here: the rows that this member has of it.
    """
    num_rows = layout.tail_row
    if num_rows * ROW_BYTES <= SMALL_BYTES:
        chosen = [range(num_rows)]
    else:
        parts = split_rows(range(num_rows), PARTS)
        chosen = [range(num_rows - FARTHEST_BYTES // ROW_BYTES, num_rows), parts[step % PARTS]]
    return [part for rows in chosen for own in here if (part := within(own, rows))]


def is_finite(slot: Slot, rows: range) -> bool:
    """Return whether the gradients in these rows of a slot are finite: also where their sum would overflow."""
    return all(bool(torch.isfinite(values).all()) for values in _gradients(slot, rows))


def _gradients(slot: Slot, rows: range) -> Iterator[Tensor]:
    """Yield what is in these rows of a slot, as real numbers."""
    for piece in slot.layout.pieces(rows.start, rows.stop):
        values = slot.typed(piece.dtype)[piece.start : piece.stop]
        yield torch.view_as_real(values) if values.is_complex() else values
