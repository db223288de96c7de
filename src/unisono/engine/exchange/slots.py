"""The slots that a worker has in use, carried over from one generation's exchange to the next."""

from __future__ import annotations

from unisono.core.tree import Node
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.flat import FlatLayout, Slot

__all__ = ["Slots"]


class Slots:
    """Slots of a worker that are in use: the nodes of the step under way, and the results that the script still reads.

    Attributes:
        layout: of the current sums; None before the first sum.
        nodes: the complete nodes of the step under way.
        ahead: by number of the step, the nodes of steps whose sums are under way (`unisono.strategies.delay.pipeline`).
        results: the sums of which the script may still hold gradients, oldest first; ``.grad`` is a view of the last's.
    """

    def __init__(self) -> None:
        self.layout: FlatLayout | None = None
        self.nodes: dict[Node, Slot] = {}
        self.ahead: dict[int, dict[Node, Slot]] = {}
        self.results: list[Slot] = []

    def bring(self, exchange: Exchange, layout: FlatLayout | None) -> None:
        """Prepare an exchange for a layout, and make the slots in use its own. Collective.

        A slot of another layout stays as it is: a member that is a round ahead may hold nodes of the next layout,
        which wait until that layout counts.
        """
        if layout is None:
            return
        nodes = {node: slot for node, slot in self.nodes.items() if slot.layout == layout}
        results = [slot for slot in self.results if slot.layout == layout]
        ahead = [slot for held in self.ahead.values() for slot in held.values() if slot.layout == layout]
        kept = [*nodes.values(), *results, *ahead]
        now = {before.key: after for before, after in zip(kept, exchange.prepare(layout, kept), strict=True)}
        self.nodes = {node: now.get(slot.key, slot) for node, slot in self.nodes.items()}
        self.results = [now.get(slot.key, slot) for slot in self.results]
        self.ahead = {
            number: {node: now.get(slot.key, slot) for node, slot in held.items()}
            for number, held in self.ahead.items()
        }

    def release_results(self, exchange: Exchange) -> None:
        """Free the results that nobody reads any more: neither ``.grad`` nor the script holds a gradient of them."""
        kept = [slot for slot in self.results if slot.is_shared()]
        for slot in self.results:
            if slot not in kept:
                exchange.release(slot)
        self.results = kept
