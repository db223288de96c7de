"""Orders are pure functions of (seed, epoch)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.cursor import Cursor, Permutation, SampleOrder, seed_of
from unisono.core.errors import RecipeError
from unisono.core.orders import (
    KEPT_EPOCHS,
    Buckets,
    Drawn,
    Listed,
    Sequential,
    Shuffled,
    ShuffledSubset,
    Weighted,
    WeightedOnce,
    digest,
    floats,
)

WEIGHTS = [0.5, 0.0, 3.0, 1.0, 0.0, 2.5, 1e-3, 7.0]
LENGTHS = [(17 * index) % 23 for index in range(47)]

MAKERS: dict[str, Callable[[], SampleOrder]] = {
    "sequential": lambda: Sequential.of(20),
    "shuffled": lambda: Shuffled.of(20),
    "a part of a shuffled order": lambda: Shuffled(20, 13),
    "several shuffled orders": lambda: Shuffled(20, 53),
    "drawn": lambda: Drawn(20, 33),
    "weighted": lambda: Weighted(WEIGHTS, 31),
    "weighted once": lambda: WeightedOnce(WEIGHTS, 5),
    "subset": lambda: ShuffledSubset([3, 5, 8, 13, 21]),
    "buckets": lambda: Buckets(LENGTHS, 4, 3),
    "listed": lambda: Listed(3, 9, lambda seed, epoch: [seed % 9, epoch % 9, 4], "three"),
}


def listed(order: SampleOrder, seed: int, epoch: int) -> list[int]:
    places = order.epoch(seed, epoch)
    return [places[position] for position in range(len(places))]


@pytest.mark.parametrize("kind", MAKERS)
def test_an_order_is_a_function_of_seed_and_epoch_alone(kind: str) -> None:
    """Whatever was asked before, in which sequence, and which object is asked."""
    first, second = MAKERS[kind](), MAKERS[kind]()
    epochs = [0, 1, 2, 3, 4, 5, 1000]
    expected = {epoch: listed(first, 7, epoch) for epoch in epochs}
    for epoch in reversed(epochs):
        places = second.epoch(7, epoch)
        backwards = [places[position] for position in reversed(range(len(places)))]
        assert backwards[::-1] == expected[epoch]
    assert {epoch: listed(first, 7, epoch) for epoch in epochs} == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_an_epoch_has_the_length_and_the_indices_that_the_order_names(kind: str) -> None:
    order = MAKERS[kind]()
    for epoch in range(5):
        found = listed(order, 7, epoch)
        assert len(found) == order.num_samples
        assert all(0 <= index < order.num_indices for index in found)
        assert order.repeats or len(set(found)) == len(found)


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind not in ("sequential", "listed")])
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    order = MAKERS[kind]()
    found = [tuple(listed(order, seed, epoch)) for seed in (0, 7) for epoch in range(4)]
    assert len(set(found)) > 5, "small orders may be equal by chance"


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind not in ("sequential", "listed")])
@pytest.mark.parametrize("position", [-1, 1000])
def test_a_position_outside_an_epoch_is_an_index_error(kind: str, position: int) -> None:
    order = MAKERS[kind]()
    if isinstance(order, (WeightedOnce, Buckets)):
        position = abs(position) * 1000  # stored: a negative position counts from the end
    with pytest.raises(IndexError):
        order.epoch(7, 0)[position]


def test_shuffling_without_further_words_is_the_permutation_of_seed_and_epoch() -> None:
    for epoch in range(3):
        permutation = Permutation(50, seed_of(7, "order", epoch))
        expected = [permutation[position] for position in range(50)]
        assert listed(Shuffled.of(50), 7, epoch) == expected
        assert listed(Shuffled(50, 20), 7, epoch) == expected[:20]
        assert listed(Shuffled(50, 120), 7, epoch)[:50] == expected
        assert sorted(listed(Shuffled(50, 120), 7, epoch)[50:100]) == list(range(50))


def test_the_arithmetic_of_orders_is_frozen() -> None:
    """A change here changes the bits of runs. It needs a line in CHANGELOG.md."""
    assert listed(Drawn(10, 12), 7, 3) == [4, 1, 5, 1, 6, 9, 9, 8, 9, 0, 9, 6]
    assert listed(Weighted(WEIGHTS, 12), 7, 3) == [5, 2, 7, 2, 7, 7, 7, 7, 7, 0, 7, 7]
    assert listed(WeightedOnce(WEIGHTS, 6), 7, 3) == [5, 7, 2, 0, 3, 6]
    assert listed(Buckets([5, 1, 4, 2, 3, 0, 9, 7], 2, 2), 7, 3) == [5, 4, 1, 3, 0, 6, 2, 7]
    assert digest(floats(WEIGHTS, "weight")) == "621b2d27ce65f0f4"


# -- weights -----------------------------------------------------------------------------------------


def chi_squared(counts: Counter[int], expected: dict[int, float]) -> float:
    return sum((counts[index] - mean) ** 2 / mean for index, mean in expected.items())


def bound(cells: int) -> float:
    """6 standard deviations above the mean of chi-squared."""
    return (cells - 1) + 6 * math.sqrt(2 * (cells - 1))


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = [0.5, 0.0, 3.0, 1.0, 0.0, 2.5, 7.0]
    draws, epochs = 2000, 10
    order = Weighted(weights, draws)
    counts = Counter(index for epoch in range(epochs) for index in listed(order, 7, epoch))
    expected = {i: w / sum(weights) * draws * epochs for i, w in enumerate(weights) if w > 0}
    assert counts.keys() == expected.keys(), "a sample of weight 0 is never drawn"
    assert chi_squared(counts, expected) < bound(len(expected))


def test_draws_with_replacement_are_uniform_and_independent_of_their_neighbours() -> None:
    order = Drawn(7, 3000)
    drawn = [index for epoch in range(10) for index in listed(order, 7, epoch)]
    assert chi_squared(Counter(drawn), {index: len(drawn) / 7 for index in range(7)}) < bound(7)
    pairs = Counter(7 * a + b for a, b in itertools.pairwise(drawn))
    assert chi_squared(pairs, {cell: (len(drawn) - 1) / 49 for cell in range(49)}) < bound(49)


def test_the_first_and_second_draw_without_replacement_have_the_right_chances() -> None:
    """P(a, b) = w_a / sum * w_b / (sum - w_a): of a, then of b among those that are left."""
    weights, epochs = [1.0, 2.0, 3.0, 4.0], 20_000
    order = WeightedOnce(weights, 2)
    pairs = Counter(4 * a + b for a, b in (listed(order, 7, epoch) for epoch in range(epochs)))
    total = sum(weights)
    expected = {
        4 * a + b: epochs * weights[a] / total * weights[b] / (total - weights[a])
        for a, b in itertools.permutations(range(4), 2)
    }
    assert chi_squared(pairs, expected) < bound(len(expected))


def test_without_replacement_each_sample_that_has_a_weight_comes_once() -> None:
    order = WeightedOnce(WEIGHTS, 6)
    assert sorted(listed(order, 7, 0)) == [0, 2, 3, 5, 6, 7]


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=30), st.integers(0, 2**64 - 1))
def test_what_is_drawn_has_a_weight(weights: list[float], seed: int) -> None:
    if not 0 < math.fsum(weights) < math.inf or max(weights) > 1e298:
        return
    assert all(weights[index] > 0 for index in listed(Weighted(weights, 50), seed, 0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weighted([1.0, -2.0], 3), "the weight of sample 1 is -2.0"),
        (lambda: Weighted([1.0, math.nan], 3), "the weight of sample 1 is nan"),
        (lambda: Weighted([math.inf], 3), "the weight of sample 0 is inf"),
        (lambda: Weighted([0.0, 0.0], 3), "the sum of the weights is 0.0"),
        (lambda: Weighted([1e308] * 3, 3), "the sum of the weights is inf"),
        (lambda: Weighted([], 3), "needs the weight of each sample, got an empty list"),
        (lambda: WeightedOnce([1.0, 0.0, 2.0], 3), "only 2 of 3 have a weight of more than 0; use num_samples=2"),
        (lambda: ShuffledSubset([4, -1]), "has the index -1; indices count from 0"),
        (lambda: Buckets([1, 2], 0, 1), "batch_size and pool must be at least 1, got 0 and 1"),
        (lambda: Buckets([1, -2], 1, 1), "the length of sample 1 is -2"),
    ],
)
def test_numbers_that_make_no_order_are_refused(make: Callable[[], SampleOrder], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make()


# -- buckets -----------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5), st.lists(st.integers(0, 50), min_size=1, max_size=120), st.integers(0, 9))
def test_buckets_have_every_sample_once(batch_size: int, pool: int, lengths: list[int], epoch: int) -> None:
    order = Buckets(lengths, batch_size, pool)
    assert sorted(listed(order, 7, epoch)) == list(range(len(lengths)))


def test_a_batch_of_a_bucket_has_like_lengths() -> None:
    """Of 1,000 lengths, 10 that stand together in a sorted pool of 1,000 differ by a hundredth of all on average."""
    lengths = [seed_of(1, index) % 1000 for index in range(1000)]
    found = listed(Buckets(lengths, 10, 100), 7, 0)
    spreads = [
        max(lengths[i] for i in found[start : start + 10]) - min(lengths[i] for i in found[start : start + 10])
        for start in range(0, 1000, 10)
    ]
    assert sum(spreads) / len(spreads) < 15
    means = [sum(lengths[i] for i in found[start : start + 10]) / 10 for start in range(0, 1000, 10)]
    rising = sum(a < b for a, b in itertools.pairwise(means))
    assert 30 < rising < 70, "the batches themselves come in no order"


def test_samples_of_any_length_are_in_the_partial_batch() -> None:
    """And of one length nobody is left out in all epochs, with `drop_last` either."""
    lengths = list(range(10))
    left = Counter(index for epoch in range(300) for index in listed(Buckets(lengths, 4, 5), 7, epoch)[8:])
    assert left.keys() == set(range(10))


def test_equal_lengths_are_shuffled() -> None:
    order = Buckets([5] * 40, 4, 10)
    assert len({tuple(listed(order, 7, epoch)[:4]) for epoch in range(20)}) == 20


# -- names, memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "others",
    [
        [Weighted([1, 2], 4), Weighted([2, 1], 4), Weighted([1, 2.5], 4), WeightedOnce([1, 2], 2)],
        [ShuffledSubset([1, 2]), ShuffledSubset([2, 1]), ShuffledSubset([1, 3])],
        [Buckets([1, 2], 2, 1), Buckets([2, 1], 2, 1), Buckets([1, 2], 1, 1), Buckets([1, 2], 2, 2)],
        [Sequential.of(9), Shuffled.of(9), Shuffled(10, 9), Drawn(9, 9), Drawn(10, 9)],
    ],
)
def test_orders_that_differ_have_other_names(others: list[SampleOrder]) -> None:
    assert len({order.name for order in others}) == len(others)


def test_a_stored_order_is_computed_once_and_not_kept_for_ever() -> None:
    asked = []
    order = Listed(2, 2, lambda _, epoch: asked.append(epoch) or [0, 1], "two")
    for _ in range(3):
        for epoch in range(KEPT_EPOCHS):
            order.epoch(7, epoch)
    assert asked == list(range(KEPT_EPOCHS))
    order.epoch(7, 99)
    order.epoch(7, 0)
    assert asked == [*range(KEPT_EPOCHS), 99, 0]


# -- with a cursor -----------------------------------------------------------------------------------


def test_the_length_of_an_epoch_is_that_of_the_order() -> None:
    cursor = Cursor(order=Weighted(WEIGHTS, 31), batch_size=8, microbatches=4, seed=7)
    assert cursor.steps_per_epoch == 4
    sizes = [len(cursor.indices(3, leaf)) for leaf in range(cursor.position(3).num_leaves)]
    assert sizes == [2, 2, 2, 1]
    assert cursor.position(4).epoch == 1


def test_epochs_are_counted_on_from_those_before() -> None:
    whole = Cursor(order=Shuffled.of(20), batch_size=8, microbatches=4, seed=7)
    part = Cursor(order=Shuffled.of(20), batch_size=8, microbatches=4, seed=7, first_epoch=2)
    for step in range(6):
        assert part.position(step).epoch == 2 + step // 3
        assert part.keys(step, 1) == whole.keys(6 + step, 1)


def test_a_sample_that_comes_twice_is_augmented_twice() -> None:
    cursor = Cursor(order=Drawn(3, 24), batch_size=24, microbatches=1, seed=7)
    assert len(set(cursor.keys(0, 0))) == 24
    assert len({seed for _, seed in cursor.keys(0, 0)}) == 24


def test_the_seed_of_a_sample_that_comes_once_depends_on_epoch_and_index_alone() -> None:
    shuffled = Cursor(order=Shuffled.of(24), batch_size=8, microbatches=2, seed=7)
    sequential = Cursor(order=Sequential.of(24), batch_size=12, microbatches=1, seed=7)
    of_shuffled = {key for step in range(3) for leaf in range(2) for key in shuffled.keys(step, leaf)}
    assert of_shuffled == {key for step in range(2) for key in sequential.keys(step, 0)}
    assert dict(of_shuffled)[5] == seed_of(seed_of(7, "sample", 0), 5)
