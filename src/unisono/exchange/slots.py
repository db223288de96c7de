"""The slots that a worker has in use, carried over from one generation's exchange to the next."""

from __future__ import annotations

from unisono.decisions.tree import Node
from unisono.exchange import Exchange
from unisono.exchange.flat import FlatLayout, Slot

__all__ = ["Slots"]


class Slots:
    """Slots of a worker that are in use: the nodes of the step under way, and the result that the script still reads.

    Attributes:
        layout: of the current sums; None before the first sum.
        nodes: the complete nodes of the step under way.
        result: the sum of the last step, of which ``.grad`` is a view; None once the script no longer needs it.
    """

    def __init__(self) -> None:
        self.layout: FlatLayout | None = None
        self.nodes: dict[Node, Slot] = {}
        self.result: Slot | None = None

    def bring(self, exchange: Exchange, layout: FlatLayout | None) -> None:
        """Prepare an exchange for a layout, and make the slots in use its own. Collective.

        A slot of another layout stays as it is: a member that is a round ahead may hold nodes of the next layout,
        which wait until that layout counts.
        """
        if layout is None:
            return
        nodes = {node: slot for node, slot in self.nodes.items() if slot.layout == layout}
        result = [self.result] if self.result is not None and self.result.layout == layout else []
        brought = exchange.prepare(layout, [*nodes.values(), *result])
        self.nodes = {**self.nodes, **dict(zip(nodes, brought, strict=False))}
        if result:
            self.result = brought[-1]

    def release_result(self, exchange: Exchange) -> None:
        """Free the last result, which is not read any more."""
        if self.result is not None:
            exchange.release(self.result)
            self.result = None
