"""Packing: the rows of a node as they travel between hosts.

Where a layout rounds, the gradients of a node are bfloat16 numbers, from a fixed level of the tree on. They lie in
memory as float32, and travel as what they are: the upper half of their bits, without loss. Everything else travels as
it lies: the tail, gradients in float64, and nodes below that level.

Packed rows keep their order; those that are rounded take 256 bytes instead of 512.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.core.routes import Ranges
from unisono.core.tree import Node
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Rows

__all__ = ["Packing", "narrowed", "regions", "widened"]


def regions(layout: FlatLayout, rows: range) -> Iterator[tuple[range, bool]]:
    """Cut rows into those that are rounded and those that are not, in their order: (rows, whether they are rounded)."""
    narrow = layout.rounded_rows
    for first, stop, rounded in (
        (0, narrow.start, False),
        (narrow.start, narrow.stop, True),
        (narrow.stop, rows.stop, False),
    ):
        part = range(max(rows.start, first), min(rows.stop, stop))
        if part:
            yield part, rounded


def narrowed(lying: Tensor) -> Tensor:
    """Return bytes of bfloat16 numbers that lie as float32, as they travel."""
    return lying.view(torch.float32).to(torch.bfloat16).view(torch.uint8)


def widened(packed: Tensor) -> Tensor:
    """Return bytes of bfloat16 numbers that have travelled, as they lie: as float32."""
    return packed.view(torch.bfloat16).to(torch.float32).view(torch.uint8)


class Packing:
    """How the nodes of one combine travel. Pure: both ends of a message know its length.

    Args:
        num_leaves: of the tree.
    """

    def __init__(self, layout: FlatLayout, num_leaves: int) -> None:
        self._layout = layout
        self._num_leaves = num_leaves

    def num_bytes(self, parts: Ranges, node: Node) -> int:
        """Return the bytes of packed rows."""
        return sum(len(part) * _row_bytes(rounded) for rows in parts for part, rounded in self._regions(rows, node))

    def pack(self, lying: Rows, parts: Ranges, node: Node) -> Tensor:
        """Return rows of a node as they travel: (num_bytes,) uint8, of the same memory where they are one run of rows,
        and nothing is rounded.
        """
        if self._is_as_it_lies(parts, node):
            return _bytes_of(lying, parts[0])
        packed = torch.empty(self.num_bytes(parts, node), dtype=torch.uint8, device=lying.memory.device)
        for place, part, kind in self._places(packed, parts, node):
            place.copy_(_bytes_of(lying, part).view(kind))
        return packed

    def width(self, parts: Ranges, node: Node) -> int:
        """Return the bytes of the numbers that most of these rows are, as they travel."""
        found: Counter[int] = Counter()
        for rows in parts:
            for piece in self._layout.pieces(rows.start, rows.stop):
                narrow = piece.rounded and self._layout.rounds(node, self._num_leaves)
                size = 2 if narrow else piece.dtype.itemsize
                found[size] += (piece.stop - piece.start) * size
        return found.most_common(1)[0][0] if found else 0

    def room(self, out: Rows, parts: Ranges, node: Node) -> Tensor:
        """Return memory into which rows can be received, to be unpacked to ``out``: that of ``out``, if they fit."""
        if self._is_as_it_lies(parts, node):
            return _bytes_of(out, parts[0])
        return torch.empty(self.num_bytes(parts, node), dtype=torch.uint8, device=out.memory.device)

    def unpack(self, packed: Tensor, parts: Ranges, node: Node, out: Rows | None = None) -> list[Rows]:
        """Return rows that have travelled as they lie in memory, run by run.

        Args:
            packed: (num_bytes,) uint8.
            out: where they go. None: to memory of their own, which is that of ``packed`` where nothing is rounded.
        """
        found, start = [], 0
        for rows in parts:
            stop = start + self.num_bytes((rows,), node)
            found.append(self._unpacked(packed[start:stop], rows, node, out))
            start = stop
        return found

    def _unpacked(self, packed: Tensor, rows: range, node: Node, out: Rows | None) -> Rows:
        if out is None and self._is_as_it_lies((rows,), node):
            return Rows(packed, rows.start)
        if out is None:
            out = Rows(torch.empty(len(rows) * ROW_BYTES, dtype=torch.uint8, device=packed.device), rows.start)
        for place, part, kind in self._places(packed, (rows,), node):
            if (target := _bytes_of(out, part).view(kind)).data_ptr() != place.data_ptr():
                target.copy_(place)
        return out

    def _regions(self, rows: range, node: Node) -> list[tuple[range, bool]]:
        """Cut rows of a node into those that travel in half the bytes and those that travel as they lie."""
        if not self._layout.rounds(node, self._num_leaves):
            return [(rows, False)]
        return list(regions(self._layout, rows))

    def _is_as_it_lies(self, parts: Ranges, node: Node) -> bool:
        """Return whether these rows of a node are one run, and travel as they are."""
        return len(parts) == 1 and not any(rounded for _, rounded in self._regions(parts[0], node))

    def _places(self, packed: Tensor, parts: Ranges, node: Node) -> Iterator[tuple[Tensor, range, torch.dtype]]:
        """Yield (packed rows as the numbers that travel, the rows, as which numbers they lie)."""
        start = 0
        for rows in parts:
            for part, rounded in self._regions(rows, node):
                stop = start + len(part) * _row_bytes(rounded)
                travels, lies = (torch.bfloat16, torch.float32) if rounded else (torch.uint8, torch.uint8)
                yield packed[start:stop].view(travels), part, lies
                start = stop


def _row_bytes(rounded: bool) -> int:
    return ROW_BYTES // 2 if rounded else ROW_BYTES


def _bytes_of(rows: Rows, part: range) -> Tensor:
    return rows.memory[(part.start - rows.first_row) * ROW_BYTES : (part.stop - rows.first_row) * ROW_BYTES]
