"""Flat buffers: where things lie, the fingerprint, and sums against plain ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.core.tree import Node, fold, leaf, root, schedule
from unisono.engine.exchange.flat import (
    ROW_BYTES,
    FlatLayout,
    Rows,
    Slot,
    SlotEntry,
    digest_rows,
    divide_rows,
    fold_rows,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BUFFER_DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


def tensors(dtypes: list[torch.dtype], name: str) -> st.SearchStrategy[list[tuple[str, Tensor]]]:
    one = st.tuples(shapes, st.sampled_from(dtypes))
    return st.lists(one, max_size=6).map(
        lambda each: [(f"{name}{i}", torch.empty(shape, dtype=dtype)) for i, (shape, dtype) in enumerate(each)]
    )


layouts = st.builds(FlatLayout, tensors(DTYPES, "p"), tensors(BUFFER_DTYPES, "b"))


def entries(layout: FlatLayout) -> list[SlotEntry]:
    return [*layout.gradients, layout.scalars, layout.used, *layout.buffers]


def new_slot(layout: FlatLayout) -> Slot:
    return Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8))


def filled(layout: FlatLayout, seed: int) -> Slot:
    """A slot as a leaf leaves it: all entries written, nothing else."""
    slot, generator = new_slot(layout), torch.Generator().manual_seed(seed)
    for view in [*slot.gradients, slot.scalars, slot.used, *slot.buffers]:
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64) * 9)
    return slot


def whole(slot: Slot) -> Rows:
    return Rows(slot.memory, 0)


def naive_digest(layout: FlatLayout, slot: Slot) -> int:
    words = slot.rows(0, layout.num_rows).view(torch.int64).view(layout.num_rows, -1).tolist()
    factors = layout.multipliers.tolist()
    return int(sum(sum(row) * factor for row, factor in zip(words, factors, strict=True)) % 2**64)


@settings(deadline=None)
@given(layouts)
def test_entries_do_not_overlap_and_lie_in_the_right_dtype(layout: FlatLayout) -> None:
    """Every entry has bytes of its own, all of them inside exactly one piece of its dtype."""
    taken: set[int] = set()
    pieces = list(layout.pieces(0, layout.num_rows))
    for entry in entries(layout):
        size = entry.sum_dtype.itemsize
        own = range(entry.offset * size, (entry.offset + entry.shape.numel()) * size)
        assert taken.isdisjoint(own)
        taken.update(own)
        assert own.stop <= entry.end_row * ROW_BYTES <= layout.num_rows * ROW_BYTES
        if own:
            inside = [p for p in pieces if p.start * p.dtype.itemsize <= own.start < p.stop * p.dtype.itemsize]
            assert [p.dtype for p in inside] == [entry.sum_dtype]
            assert own.stop <= inside[0].stop * inside[0].dtype.itemsize
    covered = {byte for p in pieces for byte in range(p.start * p.dtype.itemsize, p.stop * p.dtype.itemsize)}
    assert covered == taken


@settings(deadline=None)
@given(layouts)
def test_gradients_lie_last_parameter_first_and_before_the_tail(layout: FlatLayout) -> None:
    """Backward finishes rows from the first on."""
    for left, right in itertools.combinations(layout.gradients, 2):
        if left.sum_dtype == right.sum_dtype:
            assert left.offset >= right.offset
    assert all(entry.end_row <= layout.tail_row for entry in layout.gradients)
    size = layout.scalars.sum_dtype.itemsize
    assert layout.scalars.offset * size == layout.tail_row * ROW_BYTES


@settings(deadline=None)
@given(layouts, st.data())
def test_pieces_of_chunks_are_those_of_the_whole(layout: FlatLayout, data: st.DataObject) -> None:
    """However the rows are cut, the same elements are named once."""
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.num_rows), max_size=4)))
    edges = [0, *cuts, layout.num_rows]

    def elements(first: int, end: int) -> list[tuple[torch.dtype, int, bool]]:
        return [(p.dtype, i, p.mean) for p in layout.pieces(first, end) for i in range(p.start, p.stop)]

    parts = [element for first, end in itertools.pairwise(edges) for element in elements(first, end)]
    assert sorted(parts, key=str) == sorted(elements(0, layout.num_rows), key=str)


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_kept_wide_enough(dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    layout = FlatLayout([("p", torch.empty(3, dtype=dtype))], [])
    assert layout.gradients[0].dtype == dtype
    assert new_slot(layout).gradients[0].dtype == sum_dtype


@pytest.mark.parametrize(
    ("dtype", "sum_dtype", "mean"),
    [
        (torch.bool, torch.int64, False),
        (torch.int32, torch.int64, False),
        (torch.int64, torch.int64, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float64, True),
    ],
)
def test_float_buffers_become_means_and_integers_sums(dtype: torch.dtype, sum_dtype: torch.dtype, mean: bool) -> None:
    layout = FlatLayout([], [("b", torch.empty((), dtype=dtype))])
    assert layout.buffers[0].sum_dtype == sum_dtype
    assert list(layout.pieces(layout.tail_row, layout.num_rows))[-1].mean == mean


def test_equal_layouts_are_equal() -> None:
    """What decides whether a slot can be kept: names, shapes and dtypes, nothing else."""

    def layout(name: str = "p", shape: tuple[int, ...] = (4, 5), dtype: torch.dtype = torch.float32) -> FlatLayout:
        return FlatLayout([(name, torch.zeros(shape, dtype=dtype))], [("b", torch.empty(2))])

    assert layout() == layout()
    assert hash(layout()) == hash(layout())
    assert layout() != layout(name="q")
    assert layout() != layout(shape=(5, 4))
    assert layout() != layout(dtype=torch.bfloat16)
    assert layout() != "layout"


@settings(deadline=None)
@given(layouts, st.data())
def test_the_digest_does_not_depend_on_chunks(layout: FlatLayout, data: st.DataObject) -> None:
    """Parts of disjoint ranges add up to the digest of the whole, wherever their memory starts."""
    slot = filled(layout, 1)
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.num_rows), max_size=4)))
    total = 0
    for first, end in itertools.pairwise([0, *cuts, layout.num_rows]):
        total += digest_rows(Rows(slot.rows(first, end).clone(), first), layout.multipliers, first, end)
    assert total % 2**64 == naive_digest(layout, slot)


@settings(deadline=None)
@given(st.data())
def test_any_one_bit_changes_the_digest(data: st.DataObject) -> None:
    layout = FlatLayout([("p", torch.empty(300)), ("q", torch.empty(70, dtype=torch.float64))], [])
    slot = filled(layout, 2)
    before = digest_rows(whole(slot), layout.multipliers, 0, layout.num_rows)
    byte = data.draw(st.integers(0, layout.num_rows * ROW_BYTES - 1))
    slot.memory[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_rows(whole(slot), layout.multipliers, 0, layout.num_rows) != before


def test_swapped_rows_change_the_digest() -> None:
    layout = FlatLayout([("p", torch.empty(256))], [])
    slot = filled(layout, 3)
    before = digest_rows(whole(slot), layout.multipliers, 0, layout.num_rows)
    slot.rows(0, 2).copy_(torch.cat([slot.rows(1, 2), slot.rows(0, 1)]))
    assert digest_rows(whole(slot), layout.multipliers, 0, layout.num_rows) != before


@settings(deadline=None, max_examples=60)
@given(layouts, st.integers(1, 9), st.data())
def test_fold_rows_is_the_fold_of_the_tree(layout: FlatLayout, num_leaves: int, data: st.DataObject) -> None:
    """In chunks, from nodes of any height, with memory of their own: the bits and the digest of the naive fold."""
    slots = {leaf(i, num_leaves): filled(layout, i) for i in range(num_leaves)}

    def add(left: Slot, right: Slot) -> Slot:
        both = new_slot(layout)
        for target, a, b in zip(
            [*both.gradients, both.scalars, both.used, *both.buffers],
            [*left.gradients, left.scalars, left.used, *left.buffers],
            [*right.gradients, right.scalars, right.used, *right.buffers],
            strict=True,
        ):
            target.copy_(a + b)
        return both

    expected = fold(slots, num_leaves, add)
    nodes = dict(slots)
    merges, _ = schedule(nodes, num_leaves)
    for left, right, parent in merges[: data.draw(st.integers(0, len(merges)))]:
        nodes[parent] = add(nodes.pop(left), nodes.pop(right))
    originals = {node: slot.memory.clone() for node, slot in nodes.items()}
    result, digest = new_slot(layout), 0
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.num_rows), max_size=3)))
    for first, end in itertools.pairwise([0, *cuts, layout.num_rows]):
        part = Rows(torch.zeros(max(1, end - first) * ROW_BYTES, dtype=torch.uint8), first)
        read = {node: Rows(slot.rows(first, end), first) for node, slot in nodes.items()}
        digest += fold_rows(layout, read, num_leaves, first, end, [part], multipliers=layout.multipliers)
        result.rows(first, end).copy_(part.memory[: (end - first) * ROW_BYTES])
    assert torch.equal(result.memory, expected.memory)
    assert digest % 2**64 == naive_digest(layout, expected)
    assert all(torch.equal(slot.memory, originals[node]) for node, slot in nodes.items())


def test_fold_rows_stops_where_the_nodes_end() -> None:
    """Nodes that do not meet are added as far as they go, and the rest is copied."""
    layout = FlatLayout([("p", torch.empty(700_000))], [])  # several blocks
    held = {Node(0, 1): filled(layout, 1), Node(0, 2): filled(layout, 2), Node(0, 3): filled(layout, 3)}
    out = [new_slot(layout), new_slot(layout)]
    fold_rows(layout, {n: whole(s) for n, s in held.items()}, 4, 0, layout.num_rows, [whole(slot) for slot in out])
    assert torch.equal(out[0].memory, held[Node(0, 1)].memory)
    assert torch.equal(out[1].gradients[0], held[Node(0, 2)].gradients[0] + held[Node(0, 3)].gradients[0])


@settings(deadline=None)
@given(layouts, st.booleans())
def test_divide_rows_divides_what_is_a_mean(layout: FlatLayout, in_place: bool) -> None:
    """Gradients and float buffers; weight, loss, bitmap and counts stay sums; padding stays zero."""
    source = filled(layout, 4)
    expected = new_slot(layout)
    source.copy_to(expected)
    floats = [view for view in expected.buffers if view.is_floating_point()]
    for view in [*expected.gradients, *floats]:
        view.copy_(view / 7.3)
    out = source if in_place else new_slot(layout)
    divide_rows(layout, whole(source), 7.3, 0, layout.num_rows, out)
    assert torch.equal(out.memory, expected.memory)


def test_a_total_weight_of_zero_leaves_zeros() -> None:
    """0 / 0 would be NaN, also in the padding, where it would stay, and be in the digests of later steps."""
    layout = FlatLayout([("p", torch.empty(3))], [])
    slot = new_slot(layout)
    divide_rows(layout, whole(slot), 0.0, 0, layout.num_rows, slot)
    assert not slot.memory[:ROW_BYTES].any()


def test_copy_to_refuses_another_layout() -> None:
    slot = new_slot(FlatLayout([("p", torch.empty(3))], []))
    with pytest.raises(ValueError, match="another layout"):
        slot.copy_to(new_slot(FlatLayout([("p", torch.empty(4))], [])))


def test_the_root_alone_is_copied_with_its_digest() -> None:
    layout = FlatLayout([("p", torch.empty(1000))], [])
    slot, out = filled(layout, 5), new_slot(layout)
    digest = fold_rows(
        layout, {root(6): whole(slot)}, 6, 0, layout.num_rows, [whole(out)], multipliers=layout.multipliers
    )
    assert torch.equal(out.memory, slot.memory)
    assert digest == naive_digest(layout, slot)
