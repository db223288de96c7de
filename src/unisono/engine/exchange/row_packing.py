"""Packing: the rows of a node as they travel between hosts.

Where a layout rounds, the gradients of a node are bfloat16 numbers, from a fixed level of the tree on. They lie in
memory as float32, and travel as what they are: the upper half of their bits, without loss. Everything else travels as
it lies: the tail, gradients in float64, and nodes below that level.

Packed rows keep their order; those that are rounded take 256 bytes instead of 512.
"""

from __future__ import annotations

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

    def _is_as_it_lies(self, rows: range, node: Node) -> bool:
        """Return whether these rows of a node travel as they are."""
        return not self._layout.rounds(node, self._num_leaves) or not any(
            rounded for _, rounded in regions(self._layout, rows)
        )

    def num_bytes(self, parts: Ranges, node: Node) -> int:
        """Return the bytes of packed rows."""
        return sum(self._bytes_of_part(rows, node) for rows in parts)

    def _bytes_of_part(self, rows: range, node: Node) -> int:
        if self._is_as_it_lies(rows, node):
            return len(rows) * ROW_BYTES
        return sum(len(part) * _row_bytes(rounded) for part, rounded in regions(self._layout, rows))

    def pack(self, lying: Rows, parts: Ranges, node: Node) -> Tensor:
        """Return rows of a node as they travel: (num_bytes,) uint8, of the same memory where they are one run of rows,
        and nothing is rounded.
        """
        if len(parts) == 1 and self._is_as_it_lies(parts[0], node):
            return _bytes_of(lying, parts[0])
        packed = torch.empty(self.num_bytes(parts, node), dtype=torch.uint8, device=lying.memory.device)
        for target, rows in self._parts(packed, parts, node):
            if self._is_as_it_lies(rows, node):
                target.copy_(_bytes_of(lying, rows))
                continue
            for place, part, rounded in self._places(target, rows):
                source = _bytes_of(lying, part)
                if rounded:
                    place.view(torch.bfloat16).copy_(source.view(torch.float32))
                else:
                    place.copy_(source)
        return packed

    def room(self, out: Rows, parts: Ranges, node: Node) -> Tensor:
        """Return memory into which rows can be received, to be unpacked to ``out``: that of ``out``, if they fit."""
        if len(parts) == 1 and self._is_as_it_lies(parts[0], node):
            return _bytes_of(out, parts[0])
        return torch.empty(self.num_bytes(parts, node), dtype=torch.uint8, device=out.memory.device)

    def unpack(self, packed: Tensor, parts: Ranges, node: Node, out: Rows | None = None) -> list[Rows]:
        """Return rows that have travelled as they lie in memory, run by run.

        Args:
            packed: (num_bytes,) uint8.
            out: where they go. None: to memory of their own, which is that of ``packed`` where nothing is rounded.
        """
        return [self._unpacked(part, rows, node, out) for part, rows in self._parts(packed, parts, node)]

    def _unpacked(self, packed: Tensor, rows: range, node: Node, out: Rows | None) -> Rows:
        is_as_it_lies = self._is_as_it_lies(rows, node)
        if out is None and is_as_it_lies:
            return Rows(packed, rows.start)
        if out is None:
            out = Rows(torch.empty(len(rows) * ROW_BYTES, dtype=torch.uint8, device=packed.device), rows.start)
        if is_as_it_lies:
            if (target := _bytes_of(out, rows)).data_ptr() != packed.data_ptr():
                target.copy_(packed)
            return out
        for source, part, rounded in self._places(packed, rows):
            target = _bytes_of(out, part)
            if rounded:
                target.view(torch.float32).copy_(source.view(torch.bfloat16))
            else:
                target.copy_(source)
        return out

    def _parts(self, packed: Tensor, parts: Ranges, node: Node) -> Iterator[tuple[Tensor, range]]:
        """Yield (bytes of packed rows, the rows), run by run."""
        start = 0
        for rows in parts:
            stop = start + self._bytes_of_part(rows, node)
            yield packed[start:stop], rows
            start = stop

    def _places(self, packed: Tensor, rows: range) -> Iterator[tuple[Tensor, range, bool]]:
        """Yield (bytes of packed rows, the rows, whether they are rounded)."""
        start = 0
        for part, rounded in regions(self._layout, rows):
            stop = start + len(part) * _row_bytes(rounded)
            yield packed[start:stop], part, rounded
            start = stop


def _row_bytes(rounded: bool) -> int:
    return ROW_BYTES // 2 if rounded else ROW_BYTES


def _bytes_of(rows: Rows, part: range) -> Tensor:
    return rows.memory[(part.start - rows.first_row) * ROW_BYTES : (part.stop - rows.first_row) * ROW_BYTES]
