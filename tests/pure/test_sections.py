"""Layouts in sections: members that together have all sections have the digest of one that has them all."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.pure.test_flat import BUFFER_DTYPES, DTYPES, tensors, whole
from unisono.core.groups import parts_of
from unisono.engine.exchange.flat import Extra, FlatLayout, Sections, Slot, digest_rows

Named = list[tuple[str, Tensor]]
EXTRAS = (Extra("right", torch.Size([]), torch.int64), Extra("sums", torch.Size([3]), torch.float64))

num_sections = st.shared(st.integers(1, 5), key="sections")


def placed(named: st.SearchStrategy[Named]) -> st.SearchStrategy[tuple[Named, list[int]]]:
    """Tensors, and the section of each, in any order."""
    return st.tuples(named, num_sections).flatmap(
        lambda found: st.tuples(
            st.just(found[0]),
            st.lists(st.integers(0, found[1] - 1), min_size=len(found[0]), max_size=len(found[0])),
        )
    )


parameters = placed(tensors(DTYPES, "p").filter(bool))
buffers = placed(tensors(BUFFER_DTYPES, "b"))


def written(layout: FlatLayout, trained: list[tuple[int, Tensor]], changed: list[tuple[int, Tensor]]) -> Slot:
    """A slot with the values that its tensors have wherever they lie: by the index of each, among all of them.

    Args:
        trained, changed: those of the layout.
    """

    def values(seed: int, view: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(view.shape, generator=draw, dtype=torch.float64) * 9

    slot = Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8))
    for (index, _), view in zip(trained, slot.gradients, strict=True):
        view.copy_(values(index, view))
    for (index, _), view in zip(changed, slot.buffers, strict=True):
        view.copy_(values(1000 + index, view))
    for number, view in enumerate([slot.scalars, *slot.extras]):
        view.copy_(values(2000 + number, view))
    slot.used.fill_(3)
    return slot


def digest(slot: Slot) -> int:
    return digest_rows(whole(slot), slot.layout.multipliers, 0, slot.layout.num_rows)


def in_sections(
    trained: tuple[Named, list[int]],
    changed: tuple[Named, list[int]],
    here: frozenset[int],
    counted: frozenset[int] | None = None,
) -> Slot:
    cut = Sections(tuple(trained[1]), tuple(changed[1]), here, here if counted is None else counted)
    layout = FlatLayout(trained[0], changed[0], EXTRAS, sections=cut)
    own = [(i, one) for i, ((_, one), section) in enumerate(zip(*trained, strict=True)) if section in here]
    own_buffers = [(i, one) for i, ((_, one), section) in enumerate(zip(*changed, strict=True)) if section in here]
    return written(layout, own, own_buffers)


@settings(deadline=None)
@given(parameters, buffers, num_sections, st.data())
def test_digests_of_parts_add_up_to_that_of_the_whole(
    trained: tuple[Named, list[int]], changed: tuple[Named, list[int]], sections: int, data: st.DataObject
) -> None:
    every = frozenset(range(sections))
    expected = digest(in_sections(trained, changed, every))
    num_parts = data.draw(st.integers(1, sections))
    found = [digest(in_sections(trained, changed, frozenset(part))) for part in parts_of(sections, num_parts)]
    assert sum(found) % 2**64 == expected


@settings(deadline=None)
@given(parameters, buffers, num_sections, st.data())
def test_sections_that_several_members_have_count_once(
    trained: tuple[Named, list[int]], changed: tuple[Named, list[int]], sections: int, data: st.DataObject
) -> None:
    expected = digest(in_sections(trained, changed, frozenset(range(sections))))
    found = 0
    for section in range(sections):
        also = frozenset(data.draw(st.lists(st.integers(0, sections - 1))))
        found += digest(in_sections(trained, changed, also | {section}, frozenset({section})))
    assert found % 2**64 == expected


@settings(deadline=None)
@given(parameters, buffers, num_sections, st.data())
def test_any_one_bit_of_a_part_changes_the_sum_of_the_digests(
    trained: tuple[Named, list[int]], changed: tuple[Named, list[int]], sections: int, data: st.DataObject
) -> None:
    """Of a gradient or of a buffer, which one member has."""
    here = frozenset({data.draw(st.integers(0, sections - 1))})
    slot = in_sections(trained, changed, here)
    before = digest(slot)
    views = [view for view in [*slot.gradients, *slot.buffers] if view.numel()]
    if not views:
        return
    view = data.draw(st.sampled_from(views))
    byte = view.view(-1).view(torch.uint8)[data.draw(st.integers(0, view.numel() * view.element_size() - 1)) :]
    byte[0] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(slot) != before


@settings(deadline=None)
@given(parameters, buffers, num_sections)
def test_one_member_answers_for_what_all_have(
    trained: tuple[Named, list[int]], changed: tuple[Named, list[int]], sections: int
) -> None:
    """The weight, the loss and the extras are on every member, and count once."""
    answering = []
    for section in range(sections):
        slot = in_sections(trained, changed, frozenset({section}))
        before = digest(slot)
        slot.scalars[0] += 1
        slot.extras[0] += 1
        answering.append(digest(slot) != before)
    assert answering == [section == max(trained[1]) for section in range(sections)]


@settings(deadline=None)
@given(parameters, buffers)
def test_a_part_has_the_entries_of_its_sections_and_no_more(
    trained: tuple[Named, list[int]], changed: tuple[Named, list[int]]
) -> None:
    for section in {*trained[1], *changed[1]}:
        layout = in_sections(trained, changed, frozenset({section})).layout
        expected = [name for (name, _), at in zip(*trained, strict=True) if at == section]
        assert [entry.name for entry in layout.gradients] == expected
        assert [entry.name for entry in layout.buffers] == [
            name for (name, _), at in zip(*changed, strict=True) if at == section
        ]
        assert len(layout.extras) == len(EXTRAS)


@settings(deadline=None)
@given(tensors(DTYPES, "p"), tensors(BUFFER_DTYPES, "b"))
def test_rows_of_a_layout_that_is_not_cut_are_numbered_through(trained: Named, changed: Named) -> None:
    """Its digests are those that runs had before there were sections: row r has the r-th factor, and none is 0."""
    layout = FlatLayout(trained, changed, EXTRAS)
    factors = layout.multipliers
    assert len(factors) == layout.num_rows
    assert bool((factors & 1).all())
    longer = FlatLayout([("x", torch.empty(128 * max(layout.num_rows, 1)))], []).multipliers
    assert torch.equal(factors, longer[: layout.num_rows])


def test_the_factors_of_rows_are_those_of_splitmix() -> None:
    """By Python's integers."""
    found = FlatLayout([("p", torch.empty(128 * 9))], []).multipliers.tolist()

    def factor(row: int) -> int:
        mask = 2**64 - 1
        value = row * (-7046029254386353131) & mask
        for shift, multiple in ((30, -4658895280553007687), (27, -7723592293110705685)):
            value = (value ^ (value >> shift)) * multiple & mask
        return value | 1

    assert [one & 2**64 - 1 for one in found] == [factor(row) for row in range(len(found))]
