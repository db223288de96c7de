"""Which members get the sum of which gradients of a step: all get all, unless a strategy says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.core.routes import Route
from unisono.engine.exchange.flat import FlatLayout

__all__ = ["Named", "Routing"]

Named = Sequence[tuple[str, Tensor]]
"""The parameters whose gradients are summed, with their names, in the order of the layout's gradients."""


class Routing:
    """Here all members get all sums. The routing of a strategy overrides both methods, which are local."""

    def routes(self, layout: FlatLayout, trained: Named, worker_ids: Sequence[str]) -> tuple[Route, ...]:
        """Return where the rows of a sum go; the same on all members. (): all go to all.

        Args:
            worker_ids: of the members, by rank.
        """
        return ()

    def stand_ins(self, trained: Named, worker_ids: Sequence[str], own_id: str) -> Sequence[Tensor | None]:
        """Return by parameter what the script finds as its ``.grad`` where the gradient went to other members; None: it
        is here.
        """
        return [None] * len(trained)
