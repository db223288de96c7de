"""The slots that a worker has in use, carried over from one generation's exchange to the next."""

from __future__ import annotations

from unisono.core.tree import Node
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.flat import FlatLayout, Slot

__all__ = ["Slots"]


class Slots:
    """Slots of a worker that are in use: the nodes of the open rounds, and the results that the script still reads.

    Attributes:
        layout: of the current sums; None before the first sum.
        open: by kind of the round, the complete nodes of the rounds that this worker has begun and not finished.
        kind: of the one that is being computed; "": none is.
        results: the sums of which the script may still hold gradients, oldest first; ``.grad`` is a view of the last's.
    """

    def __init__(self) -> None:
        self.layout: FlatLayout | None = None
        self.open: dict[str, dict[Node, Slot]] = {}
        self.kind = ""
        self.results: list[Slot] = []

    @property
    def nodes(self) -> dict[Node, Slot]:
        """The complete nodes of the round that is being computed."""
        return self.open.setdefault(self.kind, {})

    @nodes.setter
    def nodes(self, nodes: dict[Node, Slot]) -> None:
        self.open[self.kind] = nodes

    def close(self) -> None:
        """Forget the nodes of the round that is being computed, which is over."""
        self.open.pop(self.kind, None)
        self.kind = ""

    def bring(self, exchange: Exchange, layout: FlatLayout | None) -> None:
        """Prepare an exchange for a layout, and make the slots in use its own. Collective.

        A slot of another layout stays as it is: a member that is a round ahead may hold nodes of the next layout,
        which wait until that layout counts.
        """
        if layout is None:
            return
        in_use = [*(slot for nodes in self.open.values() for slot in nodes.values()), *self.results]
        kept = [slot for slot in in_use if slot.layout == layout]
        now = {before.key: after for before, after in zip(kept, exchange.prepare(layout, kept), strict=True)}
        self.results = [now.get(slot.key, slot) for slot in self.results]
        self.open = {
            kind: {node: now.get(slot.key, slot) for node, slot in nodes.items()} for kind, nodes in self.open.items()
        }

    def release_results(self, exchange: Exchange) -> None:
        """Free the results that nobody reads any more: neither ``.grad`` nor the script holds a gradient of them."""
        kept = [slot for slot in self.results if slot.is_shared()]
        for slot in self.results:
            if slot not in kept:
                exchange.release(slot)
        self.results = kept
