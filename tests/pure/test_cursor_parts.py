"""The data of replicas: equal parts of each global batch."""

from __future__ import annotations

import pytest

from unisono.core.cursor import Cursor, PartOfCursor
from unisono.core.errors import RecipeError
from unisono.core.orders import Shuffled


def cursor(num_samples: int = 50, *, drop_last: bool = False, microbatches: int = 8) -> Cursor:
    return Cursor(
        order=Shuffled.of(num_samples),
        batch_size=16,
        microbatches=microbatches,
        seed=3,
        drop_last=drop_last,
        first_epoch=2,
    )


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_the_parts_of_a_batch_are_its_micro_batches_one_after_the_other(num_parts: int) -> None:
    whole = cursor(drop_last=True)
    parts = [PartOfCursor.of(whole, part, num_parts) for part in range(num_parts)]
    for step in range(2 * whole.steps_per_epoch):
        position = whole.position(step)
        theirs = [(part, leaf) for part in parts for leaf in range(part.position(step).num_leaves)]
        assert len(theirs) == position.num_leaves
        for leaf, (part, own) in enumerate(theirs):
            assert part.keys(step, own) == whole.keys(step, leaf)
        assert {part.position(step).epoch for part in parts} == {position.epoch}


def test_a_partial_batch_is_shared_out_only_if_each_part_has_a_sample() -> None:
    """The last part has fewer micro-batches of it. An empty one would make fewer steps than the others."""
    whole = cursor(16 + 13)
    parts = [PartOfCursor.of(whole, part, 2) for part in range(2)]
    assert [part.position(1).num_samples for part in parts] == [8, 5]
    assert [part.position(1).num_leaves for part in parts] == [4, 3]
    with pytest.raises(RecipeError, match=r"8 of 16 samples.*more than 8 samples are needed.*drop_last=True"):
        PartOfCursor.of(cursor(16 + 8), 0, 2)
    PartOfCursor.of(cursor(16 + 8, drop_last=True), 0, 2)


def test_micro_batches_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(RecipeError, match="8 micro-batches cannot be divided equally among 3 replicas"):
        PartOfCursor.of(cursor(), 0, 3)
