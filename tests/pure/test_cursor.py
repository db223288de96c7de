"""The data of a step is a pure function of the recipe and the step's number."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.cursor import Cursor, Permutation, mix, seed_of
from unisono.core.errors import RecipeError, UsageError
from unisono.core.orders import Sequential, Shuffled


@st.composite
def cursors(draw: st.DrawFn) -> Cursor:
    microbatches = draw(st.integers(1, 9))
    batch_size = microbatches * draw(st.integers(1, 9))
    drop_last = draw(st.booleans())
    num_samples = draw(st.integers(batch_size if drop_last else 1, 400))
    return Cursor(
        order=Shuffled.of(num_samples) if draw(st.booleans()) else Sequential.of(num_samples),
        batch_size=batch_size,
        microbatches=microbatches,
        seed=draw(st.integers(0, 2**64 - 1)),
        drop_last=drop_last,
    )


def steps_of(cursor: Cursor, epoch: int) -> range:
    return range(epoch * cursor.steps_per_epoch, (epoch + 1) * cursor.steps_per_epoch)


def order_of(cursor: Cursor, epoch: int) -> list[int]:
    places = cursor.order.epoch(cursor.seed, epoch)
    return [places[position] for position in range(len(places))]


def samples_of(cursor: Cursor, epoch: int) -> Iterator[int]:
    for step in steps_of(cursor, epoch):
        for leaf in range(cursor.position(step).num_leaves):
            yield from cursor.indices(step, leaf)


@given(cursors(), st.integers(0, 1000))
def test_an_epoch_has_every_sample_exactly_once(cursor: Cursor, epoch: int) -> None:
    seen = Counter(samples_of(cursor, epoch))
    assert set(seen.values()) == {1}
    if cursor.drop_last:
        assert len(seen) == cursor.num_samples - cursor.num_samples % cursor.batch_size
        assert set(seen) <= set(range(cursor.num_samples))
    else:
        assert set(seen) == set(range(cursor.num_samples))


@given(cursors())
def test_only_the_last_microbatch_of_an_epoch_is_short(cursor: Cursor) -> None:
    """A row's bits change with the batch that it stands in, so the shapes are part of the recipe."""
    size = cursor.batch_size // cursor.microbatches
    positions = [cursor.position(step) for step in steps_of(cursor, 0)]
    sizes = [len(position.leaf(leaf)) for position in positions for leaf in range(position.num_leaves)]
    assert set(sizes[:-1]) <= {size}
    assert 1 <= sizes[-1] <= size
    assert {position.num_leaves for position in positions[:-1]} <= {cursor.microbatches}


@given(cursors(), st.integers(0, 10**6))
def test_a_position_is_computed_from_the_number_alone(cursor: Cursor, step: int) -> None:
    position = cursor.position(step)
    assert position.number == step
    assert step in steps_of(cursor, position.epoch)
    assert position.first == (step - steps_of(cursor, position.epoch).start) * cursor.batch_size
    assert 1 <= position.num_samples <= cursor.batch_size


@given(cursors(), st.integers(0, 50))
def test_without_shuffling_the_order_is_that_of_the_dataset(cursor: Cursor, epoch: int) -> None:
    if isinstance(cursor.order, Sequential):
        assert list(samples_of(cursor, epoch)) == list(range(len(list(samples_of(cursor, epoch)))))


@pytest.mark.parametrize("length", range(1, 301))
def test_permutation_is_one_at_every_length(length: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        assert sorted(Permutation(length, seed)) == list(range(length))


@given(st.integers(1, 20_000), st.integers(0, 2**64 - 1))
def test_permutation_is_one_at_any_seed(length: int, seed: int) -> None:
    order = Permutation(length, seed)
    positions = range(length) if length <= 500 else range(0, length, length // 500)
    values = [order[position] for position in positions]
    assert len(set(values)) == len(values)
    assert all(0 <= value < length for value in values)


@pytest.mark.parametrize("length", [2**40, 2**40 + 1, 10**12 - 11])
def test_a_permutation_of_a_trillion_takes_no_memory(length: int) -> None:
    order = Permutation(length, seed=7)
    values = [order[position] for position in [*range(2000), *range(length - 2000, length)]]
    assert len(set(values)) == len(values)
    assert all(0 <= value < length for value in values)
    # Neighbours land far apart: the mean distance of two random places is a third of the length.
    gaps = [abs(a - b) for a, b in itertools.pairwise(values)]
    assert 0.30 < sum(gaps) / len(gaps) / length < 0.37
    assert size_of(order) < 2000


def size_of(order: Permutation) -> int:
    """Bytes of the object and of all that it holds."""
    held = [value for item in vars(order).values() for value in (item if isinstance(item, list) else [item])]
    return sum(map(sys.getsizeof, [order, vars(order), *vars(order).values(), *held]))


def test_each_sample_stands_at_each_place_about_equally_often() -> None:
    """Chi-squared over 12 x 12 cells; the bound is 6 standard deviations above its mean of 121."""
    length, trials = 12, 6000
    cells = Counter((place, value) for seed in range(trials) for place, value in enumerate(Permutation(length, seed)))
    expected = trials / length
    chi_squared = sum((cells[a, b] - expected) ** 2 / expected for a in range(length) for b in range(length))
    assert chi_squared < 121 + 6 * (2 * 121) ** 0.5


def test_orders_of_different_seeds_and_epochs_differ() -> None:
    cursor = Cursor(order=Shuffled.of(50), batch_size=10, microbatches=2, seed=7)
    orders = {tuple(order_of(cursor, epoch)) for epoch in range(100)}
    others = {tuple(Permutation(50, seed)) for seed in range(100)}
    assert len(orders) == len(others) == 100
    assert not orders & others


def test_two_epochs_share_places_no_more_than_chance_has_it() -> None:
    """Two random orders agree at one place on average; 200 pairs agree at 200, give or take 6 times 14."""
    cursor = Cursor(order=Shuffled.of(500), batch_size=10, microbatches=2, seed=7)
    orders = [tuple(order_of(cursor, epoch)) for epoch in range(201)]
    agreements = sum(a == b for first, second in itertools.pairwise(orders) for a, b in zip(first, second, strict=True))
    assert 200 - 6 * 14 < agreements < 200 + 6 * 14


@pytest.mark.parametrize("position", [-1, 10, 11])
def test_a_position_outside_a_permutation_is_an_index_error(position: int) -> None:
    with pytest.raises(IndexError, match=f"position {position} is outside a permutation of 10"):
        Permutation(10, 0)[position]


@given(st.sets(st.integers(0, 2**64 - 1), max_size=200))
def test_mix_is_injective(values: set[int]) -> None:
    mixed = {mix(value) for value in values}
    assert len(mixed) == len(values)
    assert all(0 <= value < 2**64 for value in mixed)


def test_seeds_of_different_places_differ() -> None:
    places = [
        *[("microbatch", step, index) for step in range(60) for index in range(16)],
        *[("sample", epoch, index) for epoch in range(4) for index in range(300)],
        *[("step", step) for step in range(300)],
    ]
    seeds = {seed_of(run, *place) for run in (0, 1, 7) for place in places}
    assert len(seeds) == 3 * len(places)


def test_the_arithmetic_of_seeds_and_orders_is_frozen() -> None:
    """A change here changes the bits of every run that was ever made. It needs a line in CHANGELOG.md."""
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with seed 0
    assert seed_of(7, "order", 3) == 0x5B4BA9AE5749A58D
    assert list(Permutation(10, seed=7)) == [1, 6, 3, 8, 9, 2, 5, 7, 0, 4]


def refuse(match: str, num_samples: int = 1000, **recipe: int | bool) -> None:
    defaults: dict[str, int | bool] = {"batch_size": 96, "microbatches": 8, "seed": 7}
    with pytest.raises(RecipeError, match=match):
        Cursor(order=Shuffled.of(num_samples), **(defaults | recipe))  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_cut_is_refused_with_the_numbers_and_a_way_out() -> None:
    text = "a batch of 96 samples cannot be cut into 20 equal micro-batches (96 % 20 = 16); "
    refuse(re.escape(text) + r"use microbatches=.*\b16\b.*\b24\b.* or batch_size=80$", microbatches=20)


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_ways_out_that_an_error_names_work(batch_size: int, microbatches: int) -> None:
    if batch_size % microbatches == 0:
        return
    with pytest.raises(RecipeError) as caught:
        Cursor(order=Shuffled.of(1000), batch_size=batch_size, microbatches=microbatches, seed=7)
    choices, _, other_size = str(caught.value).partition("microbatches=")[2].rpartition(" or batch_size=")
    for choice in map(int, re.findall(r"\d+", choices)):
        assert (
            Cursor(order=Shuffled.of(1000), batch_size=batch_size, microbatches=choice, seed=7).microbatches == choice
        )
    assert Cursor(
        order=Shuffled.of(1000), batch_size=int(other_size), microbatches=microbatches, seed=7
    ).steps_per_epoch


def test_an_empty_dataset_is_refused() -> None:
    refuse("the dataset is empty", num_samples=0)


def test_numbers_below_one_are_refused_by_name() -> None:
    refuse("batch_size must be at least 1, got 0", batch_size=0)
    refuse("microbatches must be at least 1, got -2", microbatches=-2)


def test_dropping_the_only_batch_is_refused() -> None:
    refuse("leaves nothing of 95 samples at batch_size=96.*at most 95", num_samples=95, drop_last=True)


def test_a_recipe_error_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(RecipeError, UsageError)
    assert issubclass(RecipeError, ValueError)


def test_a_batch_of_all_samples_that_cannot_be_cut_may_be_larger() -> None:
    with pytest.raises(RecipeError, match=r"batch_size=300, of which all 297 samples are one partial batch"):
        Cursor(order=Shuffled.of(297), batch_size=297, microbatches=4, seed=0)
    assert Cursor(order=Shuffled.of(297), batch_size=300, microbatches=4, seed=0).position(0).num_leaves == 4
