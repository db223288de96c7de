"""Pool of a worker's slots of one layout: slots in use, and free ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from unisono.engine.exchange.flat import FlatLayout, Slot

__all__ = ["Pool"]


class Pool:
    """Makes slots, and reuses free ones. `slot` and `release` may be called in several threads.

    Args:
        allocate: returns zeroed memory for a slot of a layout.
    """

    def __init__(self, allocate: Callable[[FlatLayout], Tensor]) -> None:
        self._allocate = allocate
        self._layout: FlatLayout | None = None
        self._slots: dict[int, Slot] = {}
        self._free: dict[int, Slot] = {}
        self._lock = threading.Lock()

    def keep(self, layout: FlatLayout, slots: Iterable[Slot]) -> None:
        """Mark these slots as used and all others as free; forget the slots of another layout."""
        held = {slot.key: slot for slot in slots}
        for slot in held.values():
            if slot.layout != layout:
                raise ValueError(
                    f"a slot of {slot.layout.num_rows} rows was to be kept for another layout ({layout.num_rows} rows)"
                )
        if layout != self._layout:
            self._slots.clear()
        self._layout = layout
        self._slots.update(held)
        self._free = {key: slot for key, slot in self._slots.items() if key not in held}

    def slot(self) -> Slot:
        with self._lock:
            if self._free:
                return self._free.popitem()[1]
            if self._layout is None:
                raise ValueError("an exchange has no slots before `prepare`")
            slot = Slot(self._layout, self._allocate(self._layout))
            self._slots[slot.key] = slot
            return slot

    def release(self, slot: Slot) -> None:
        """Free a slot. A slot that was freed or forgotten before is left alone: it may be in use again."""
        with self._lock:
            if self._slots.get(slot.key) is slot:
                self._free[slot.key] = slot

    def __contains__(self, slot: Slot) -> bool:
        return self._slots.get(slot.key) is slot

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def clear(self) -> None:
        self._slots.clear()
        self._free.clear()
        self._layout = None
