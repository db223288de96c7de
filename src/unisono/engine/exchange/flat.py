"""Layout of a step's sums as one flat run of bytes.

Everything that is summed over the micro-batches of a step lies in one buffer, the **slot**: gradients, and
behind them the tail: weight and loss, how often each parameter was used, and the changes of the model's
buffers. A slot is cut into **rows** of 512 bytes; any range of rows can be sent, added and fingerprinted by
itself, whatever lies in it. ::

    rows   0                                            tail_row       num_rows
           | gradients, float32 | gradients, float64 ... | scalars | used | buffers | extras |
             last parameter first: backward finishes them in this order

The **extras** are whatever else the micro-batches of a step add up: the sums of ``step.add``, and the rows that a
micro-batch has written for later steps.

Sums of bfloat16 and float16 gradients are kept in float32: adding M of them in 8 bits of mantissa would lose the
differences between micro-batches. A parameter without a gradient in some leaf counts as +0.0 there, in every
implementation, so that it does not matter which member adds it.

A layout may **round**: then the float32 sums of gradients are bfloat16 numbers in every node from a fixed level of the
tree on (`ROUNDED_NODES`), because whoever forms such a node rounds it at once. They lie in a slot as float32 all the
same, and travel between hosts in half the bytes (`unisono.engine.exchange.row_packing`).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.core.errors import UsageError
from unisono.core.tree import Node, level_of, schedule

__all__ = [
    "ROUNDED_NODES",
    "ROW_BYTES",
    "SUM_DTYPE",
    "Extra",
    "FlatLayout",
    "Pool",
    "Rows",
    "Sections",
    "Slot",
    "SlotEntry",
    "blocks",
    "check_counting",
    "digest_rows",
    "divide_rows",
    "fold_rows",
    "num_tensors_on",
    "round_in_place",
    "with_flipped_bit",
]

ROW_BYTES = 512
"""A multiple of every element size, so that rows can be viewed as any dtype."""

SPARE_ROWS = 64
"""Room behind the last row, so that an exchange can cut a slot into equal chunks without a copy."""

BLOCK_ROWS = 4096
"""Rows that are added, divided and fingerprinted together: 2 MiB, to stay in the cache from one to the next. (In blocks
of 512 KiB, what Python spends on each costs more than a nearer cache gains: 14 against 11 ms for 100 MB.)"""

ROUNDED_NODES = 8
"""A layout that rounds begins at the lowest level with so many nodes at most: of 64 micro-batches, at the sums of 8."""

SUM_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class SlotEntry:
    """Position of one tensor in a slot."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    """Of the tensor itself; its sum may be kept in a wider one."""
    sum_dtype: torch.dtype
    offset: int
    """First element, counting elements of ``sum_dtype`` from the start of the slot."""

    @property
    def end_row(self) -> int:
        return -(-(self.offset + self.shape.numel()) * self.sum_dtype.itemsize // ROW_BYTES)


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a slot viewed as ``dtype``."""

    dtype: torch.dtype
    start: int
    stop: int
    mean: bool
    """Whether they are divided by the total weight at the end."""
    rounded: bool = False
    """Whether they are bfloat16 numbers in the nodes that the layout rounds."""


@dataclass(frozen=True)
class Sections:
    """Cut of a layout into sections, of which a member may have some: the sections of a model that is cut into stages.

    Every section begins with a row of its own, and a row has the same factor in the digest wherever it lies in a slot.
    So the digests of members that together have all sections add up to that of a member that has all of them: a section
    that several members have counts for one of them.
    """

    parameters: tuple[int, ...]
    """By parameter, its section."""
    buffers: tuple[int, ...]
    here: frozenset[int]
    """The sections of this member."""
    counted: frozenset[int]
    """Those that count in its digest."""

    @property
    def answers(self) -> bool:
        """Whether the rows that every member has (weight, loss, extras) count in the digest of this one."""
        return max(self.parameters) in self.counted


class Extra(NamedTuple):
    """One tensor that the micro-batches add up besides gradients and buffers."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    """int64 or float64."""


class FlatLayout:
    """Positions of all tensors in a slot. A pure function of its arguments: equal on all members.

    Args:
        parameters: (name, parameter), whose gradients are summed.
        buffers: (name, buffer), whose changes are summed.
        extras: what else is summed.
        means: divide the gradients by the total weight.
        rounds: round the gradients' sums from a fixed level of the tree on.
        sections: which of the parameters and buffers are here; None: all, and the layout is not cut.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        buffers: Sequence[tuple[str, Tensor]],
        extras: Sequence[Extra] = (),
        *,
        means: bool = True,
        rounds: bool = False,
        sections: Sections | None = None,
    ) -> None:
        self._pieces: list[Piece] = []
        self._row = 0
        self._numbers: list[range] = []
        """Of the rows here, in the layout of a member that has all sections."""
        self._silent: list[range] = []
        """The rows here that do not count in the digest."""
        cut = sections or Sections((0,) * len(parameters), (0,) * len(buffers), frozenset({0}), frozenset({0}))
        self._whole_row = 0
        order = sorted({*cut.parameters, *cut.buffers}, reverse=True)
        self._rounds = rounds
        self.rounded_rows = range(0)
        """The rows of the sums that are rounded: half of their bytes say all."""
        gradients: dict[int, SlotEntry] = {}
        kinds = dict.fromkeys(SUM_DTYPE.get(tensor.dtype, tensor.dtype) for _, tensor in reversed(parameters))
        for sum_dtype in kinds:
            first_row, rounded = self._row, rounds and sum_dtype == torch.float32
            for section in order:
                group = [
                    i
                    for i, (_, t) in enumerate(parameters)
                    if SUM_DTYPE.get(t.dtype, t.dtype) == sum_dtype and cut.parameters[i] == section
                ]
                group.reverse()
                named = [parameters[i] for i in group]
                if section in cut.here:
                    placed = self._append(sum_dtype, named, mean=means, rounded=rounded, counts=section in cut.counted)
                    gradients.update(zip(group, placed, strict=True))
                else:
                    self._pass_over(sum_dtype, named)
            if rounded:
                self.rounded_rows = range(first_row, self._row)
        self.gradients = [gradients[index] for index in sorted(gradients)]
        self.tail_row = self._row
        scalars = torch.empty(2)  # weight, and the sum of weight * loss
        answers = sections is None or cut.answers
        self.scalars = self._append(torch.float64, [("scalars", scalars)], mean=False, counts=answers)[0]
        used = torch.empty(len(gradients), device="meta")
        # In sections it has other rows on each member; which parameters were used is in the other bits anyway.
        is_whole = sections is None
        self.used = self._append(torch.int32, [("used", used)], mean=False, counts=is_whole, is_placed=is_whole)[0]
        by_index: dict[int, SlotEntry] = {}
        for sum_dtype in (torch.int64, torch.float32, torch.float64):
            for section in order:
                group = [
                    i
                    for i, (_, t) in enumerate(buffers)
                    if buffer_sum_dtype(t.dtype) == sum_dtype and cut.buffers[i] == section
                ]
                if not group:
                    continue
                named = [buffers[i] for i in group]
                if section in cut.here:
                    placed = self._append(
                        sum_dtype, named, mean=sum_dtype.is_floating_point, counts=section in cut.counted
                    )
                    by_index.update(zip(group, placed, strict=True))
                else:
                    self._pass_over(sum_dtype, named)
        self.buffers = [by_index[index] for index in sorted(by_index)]
        placed_extras: dict[int, SlotEntry] = {}
        for dtype in (torch.int64, torch.float64):
            group = [i for i, extra in enumerate(extras) if extra.dtype == dtype]
            if group:
                named = [(extras[i].name, torch.empty(extras[i].shape, device="meta")) for i in group]
                placed_extras.update(zip(group, self._append(dtype, named, mean=False, counts=answers), strict=True))
        self.extras = [placed_extras[index] for index in range(len(extras))]
        self.num_rows = self._row

    def _append(
        self,
        dtype: torch.dtype,
        named: Sequence[tuple[str, Tensor]],
        *,
        mean: bool,
        rounded: bool = False,
        counts: bool = True,
        is_placed: bool = True,
    ) -> list[SlotEntry]:
        first_row = self._row
        start = offset = self._row * ROW_BYTES // dtype.itemsize
        entries = []
        for name, tensor in named:
            entries.append(SlotEntry(name, tensor.shape, tensor.dtype, dtype, offset))
            offset += tensor.numel()
        self._row = -(-offset * dtype.itemsize // ROW_BYTES)
        # Without the padding of the last row, which is never written, so it is zero in every slot and digest.
        if offset > start:
            self._pieces.append(Piece(dtype, start, offset, mean, rounded))
        num_rows = self._row - first_row
        self._numbers.append(range(self._whole_row, self._whole_row + num_rows))
        if not counts:
            self._silent.append(range(first_row, self._row))
        if counts or is_placed:
            self._whole_row += num_rows
        return entries

    def _pass_over(self, dtype: torch.dtype, named: Sequence[tuple[str, Tensor]]) -> None:
        """Leave out what is not here."""
        self._whole_row += -(-sum(tensor.numel() for _, tensor in named) * dtype.itemsize // ROW_BYTES)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLayout):
            return NotImplemented
        return self._pieces == other._pieces and self._entries == other._entries

    def __hash__(self) -> int:
        return hash(tuple(self._pieces))

    @property
    def _entries(self) -> list[SlotEntry]:
        return [*self.gradients, self.scalars, self.used, *self.buffers, *self.extras]

    @property
    def slot_bytes(self) -> int:
        """The memory of a slot."""
        return (self.num_rows + SPARE_ROWS) * ROW_BYTES

    def pieces(self, first_row: int, end_row: int) -> Iterator[Piece]:
        """Yield the typed pieces of rows ``[first_row, end_row)``."""
        for piece in self._pieces:
            per_row = ROW_BYTES // piece.dtype.itemsize
            start, stop = max(piece.start, first_row * per_row), min(piece.stop, end_row * per_row)
            if start < stop:
                yield Piece(piece.dtype, start, stop, piece.mean, piece.rounded)

    def rounds(self, node: Node, num_leaves: int) -> bool:
        """Return whether whoever forms this node rounds its gradients."""
        return self._rounds and node.level >= level_of(ROUNDED_NODES, num_leaves)

    @functools.cached_property
    def multipliers(self) -> Tensor:
        """(num_rows,) int64: the factor of each row in the digest, odd; 0 for a row that another member answers for."""
        index = torch.cat([torch.arange(part.start, part.stop, dtype=torch.int64) for part in self._numbers])
        value = index * -7046029254386353131  # SplitMix64, in wrapping int64 arithmetic
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * factor
        value |= 1
        for rows in self._silent:
            value[rows.start : rows.stop] = 0
        return value


def buffer_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which differences of a buffer are summed."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32 if dtype.is_floating_point else torch.int64


class Slot:
    """A buffer that holds one node, with a view for each thing in it.

    Args:
        memory: (at least ``num_rows * ROW_BYTES``,) uint8; zero where no entry lies.
    """

    _keys = itertools.count(1)

    def __init__(self, layout: FlatLayout, memory: Tensor) -> None:
        self.layout = layout
        self.memory = memory
        self.key = next(self._keys)
        """Identifies this slot among all slots of its process."""
        self._typed: dict[torch.dtype, Tensor] = {}
        self.gradients = [self._view(entry) for entry in layout.gradients]
        self.buffers = [self._view(entry) for entry in layout.buffers]
        self.extras = [self._view(entry) for entry in layout.extras]
        self.scalars = self._view(layout.scalars)
        self.used = self._view(layout.used)
        self.tail = [self.typed(p.dtype)[p.start : p.stop] for p in layout.pieces(layout.tail_row, layout.num_rows)]
        self._num_others = num_tensors_on(memory) - len(self._typed)

    def typed(self, dtype: torch.dtype) -> Tensor:
        """Return the whole slot viewed as ``dtype``."""
        if dtype not in self._typed:
            self._typed[dtype] = self.memory.view(dtype)
        return self._typed[dtype]

    def is_shared(self) -> bool:
        """Return whether there are tensors on this memory besides the slot's own: views of a gradient, say."""
        return num_tensors_on(self.memory) > self._num_others + len(self._typed)

    def rows(self, first_row: int, end_row: int) -> Tensor:
        """((end_row - first_row) * ROW_BYTES,) uint8."""
        return self.memory[first_row * ROW_BYTES : end_row * ROW_BYTES]

    def copy_to(self, other: Slot) -> Slot:
        """Copy the node to another slot of an equal layout, and return that."""
        if other.layout != self.layout:
            raise ValueError(
                f"a slot of {self.layout.num_rows} rows cannot be copied to one of another layout "
                f"({other.layout.num_rows} rows)"
            )
        other.rows(0, self.layout.num_rows).copy_(self.rows(0, self.layout.num_rows))
        return other

    def _view(self, entry: SlotEntry) -> Tensor:
        return self.typed(entry.sum_dtype)[entry.offset : entry.offset + entry.shape.numel()].view(entry.shape)


class Pool:
    """A worker's slots of one layout, in use and free: it makes slots, and reuses free ones.

    `slot` and `release` may be called in several threads.

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


def num_tensors_on(tensor: Tensor) -> int:
    """Return how many tensors use the memory of this one, itself among them."""
    storage = tensor.untyped_storage()  # it is counted as well
    return torch._C._storage_Use_Count(storage._cdata) - 1


def check_counting() -> None:
    """Raise UsageError if this torch does not count as expected: the script's gradients would be written over."""
    first, expected = torch.empty(2), [1, 2, 3, 1]
    found = [num_tensors_on(first)]
    views = [first.detach()]
    found.append(num_tensors_on(first))
    views.append(first[:1])
    found.append(num_tensors_on(first))
    views.clear()
    found.append(num_tensors_on(first))
    if found != expected:
        raise UsageError(
            f"torch {torch.__version__} counts the tensors that share memory differently ({found} instead of "
            f"{expected}), so gradients that a script keeps would be overwritten: use a version of torch that "
            "docs/gpus.md lists"
        )


@dataclass(frozen=True)
class Rows:
    """Some rows of a slot that lie elsewhere: ``memory`` starts with row ``first_row``."""

    memory: Tensor
    first_row: int

    def piece(self, piece: Piece) -> Tensor:
        shift = self.first_row * ROW_BYTES // piece.dtype.itemsize
        return self.memory.view(piece.dtype)[piece.start - shift : piece.stop - shift]


def blocks(first_row: int, end_row: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Cut rows into blocks that fit a core's cache; on an accelerator, where a launch costs more, into one."""
    size = BLOCK_ROWS if device.type == "cpu" else max(1, end_row - first_row)
    return ((row, min(row + size, end_row)) for row in range(first_row, end_row, size))


def fold_rows(
    layout: FlatLayout,
    nodes: Mapping[Node, Rows],
    num_leaves: int,
    first_row: int,
    end_row: int,
    out: Sequence[Rows],
    *,
    multipliers: Tensor | None = None,
) -> int:
    """Add rows ``[first_row, end_row)`` of ``nodes`` as far up the tree as they go.

    Args:
        nodes: not modified.
        out: memory for the nodes that remain, from left to right (just one for the root).
        multipliers: take the digest of the results as well (see `digest_rows`).

    Returns:
        The digest of ``out[0]``'s rows, modulo 2**64; 0 without multipliers.
    """
    merges, rest = schedule(nodes, num_leaves)
    rounded = {merged.parent for merged in merges if layout.rounds(merged.parent, num_leaves)}
    final = dict(zip(rest, out, strict=True))
    digest = 0
    for block, block_end in blocks(first_row, end_row, out[0].memory.device):
        for piece in layout.pieces(block, block_end):
            held = {node: rows.piece(piece) for node, rows in nodes.items()}
            owned: set[Node] = set()
            for left, right, parent in merges:
                a, b = held.pop(left), held.pop(right)
                if parent in final:
                    target = final[parent].piece(piece)
                else:
                    target = a if left in owned else b if right in owned else torch.empty_like(a)
                    owned.add(parent)
                held[parent] = torch.add(a, b, out=target)
                if piece.rounded and parent in rounded:
                    round_in_place(target)
            for node, rows in final.items():
                if node in nodes:
                    rows.piece(piece).copy_(held[node])
        if multipliers is not None:
            digest += digest_rows(out[0], multipliers, block, block_end)
    return digest & 0xFFFFFFFFFFFFFFFF


def round_in_place(values: Tensor) -> Tensor:
    """Replace float32 values by the nearest bfloat16 numbers (ties to even), and return them."""
    return values.copy_(values.to(torch.bfloat16))


def digest_rows(rows: Rows, multipliers: Tensor, first_row: int, end_row: int) -> int:
    """Return a 64-bit fingerprint of rows ``[first_row, end_row)``; those of disjoint ranges add up, modulo 2**64.

    Every row's 64 words are added, the sum is multiplied by the row's own odd factor, and the rows are added, all
    modulo 2**64. So any one changed bit changes the fingerprint, which does not depend on how the rows are cut into
    chunks. It finds divergence, and does not resist an adversary.
    """
    return int(digest_there(rows, multipliers, first_row, end_row)) & 0xFFFFFFFFFFFFFFFF


def digest_there(rows: Rows, multipliers: Tensor, first_row: int, end_row: int) -> Tensor:
    """Return what `digest_rows` does as an int64 where the rows lie: nothing waits for it."""
    start, stop = first_row - rows.first_row, end_row - rows.first_row
    words = rows.memory[start * ROW_BYTES : stop * ROW_BYTES].view(torch.int64).view(-1, ROW_BYTES // 8)
    return (words.sum(dim=1) * multipliers[first_row:end_row]).sum()


def with_flipped_bit(tensor: Tensor, bit: int) -> Tensor:
    """Return a copy of a tensor in which one bit is another, as a faulty machine would have it: of the first bytes."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    found.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return found


def divide_rows(layout: FlatLayout, source: Rows, total: float, first_row: int, end_row: int, out: Slot) -> None:
    """Write rows ``[first_row, end_row)`` to ``out``, divided by the total weight where they are means.

    Where nothing counts (``total`` is 0) the sums are zeros, and stay that.
    """
    for piece in layout.pieces(first_row, end_row):
        target = out.typed(piece.dtype)[piece.start : piece.stop]
        if piece.mean and total:
            torch.div(source.piece(piece), total, out=target)
        elif target.data_ptr() != source.piece(piece).data_ptr():
            target.copy_(source.piece(piece))
