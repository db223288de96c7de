"""A number of workers that changes by itself: it finds the last worker that is worth it, and stays there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core.efficiency import RETRY_STEPS, SETTLED, SKIPPED, Bounds, Measured, SizeChange

SAMPLES = 100


def perfect(size: int) -> float:
    return 10.0 * size


def amdahl(serial: float) -> Callable[[int], float]:
    return lambda size: 10.0 / (serial + (1 - serial) / size)


def saturated(at: int) -> Callable[[int], float]:
    return lambda size: 10.0 * min(size, at)


def sizes(
    rate: Callable[[int], float],
    num_steps: int,
    *,
    least: int = 1,
    most: int = 16,
    efficiency: float = 0.7,
    noise: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """The number of workers at each step of a run with this rate, from the smallest number on."""
    rng = random.Random(seed)
    bounds = Bounds(least=least, most=most, efficiency=efficiency)
    state, size, found = Measured(), least, []
    for step in range(num_steps):
        found.append(size)
        state = state.after(size, SAMPLES, SAMPLES / rate(size) * (1 + noise * rng.random()))
        state, change = state.decide(step, bounds)
        size = change.size if change is not None else size
        assert least <= size <= most
    return found


def changes(found: list[int]) -> list[int]:
    return [size for size, _ in itertools.groupby(found)]


def test_it_grows_as_long_as_each_worker_adds_its_part() -> None:
    assert changes(sizes(perfect, 500)) == [1, 2, 3, 4, 6, 9, 13, 16]
    assert changes(sizes(perfect, 500, least=2, most=5)) == [2, 3, 4, 5]


def test_a_size_is_measured_when_it_has_settled() -> None:
    found = sizes(perfect, 200)
    assert found.count(1) == found.count(2) == SKIPPED + SETTLED


@pytest.mark.parametrize("at", range(1, 16))
def test_it_finds_the_last_worker_that_is_worth_it_and_stays(at: int) -> None:
    found = sizes(saturated(at), 1500)
    assert set(found[600:]) == {found[-1]}, "it does not go to and fro"
    assert found[-1] == (13 if at == 12 else at), "of four workers at a time three are enough: 75%"


def test_workers_that_add_too_little_are_given_back() -> None:
    """By Amdahl's law with a tenth that is serial, the second worker adds 0.82 of the first, the third 0.68."""
    found = sizes(amdahl(0.1), 600, efficiency=0.8)
    assert changes(found) == [1, 2, 3, 2]
    assert changes(sizes(amdahl(0.1), 600, efficiency=0.75)) == [1, 2, 3], "within the slack it stays"


def test_it_is_the_next_worker_that_counts_and_not_all_of_them() -> None:
    """Eight workers at the rate of six have 75% together; the last two add nothing."""
    assert sizes(saturated(6), 800, most=8)[-1] == 6


def test_a_size_that_was_not_worth_it_is_tried_again_much_later() -> None:
    found = sizes(saturated(2), RETRY_STEPS + 300)
    tried = [step for step, size in enumerate(found) if size == 3]
    assert tried[0] < 100
    assert not [step for step in tried if 100 < step < RETRY_STEPS]
    assert [step for step in tried if step > RETRY_STEPS]
    assert found[-1] == 2


def test_another_batch_size_is_measured_anew() -> None:
    state = Measured()
    for _ in range(SKIPPED + SETTLED):
        state = state.after(2, 100, 1.0)
    assert state.rates == {2: 100.0}
    state = state.after(2, 400, 1.0)
    assert state.rates == {}
    for _ in range(SETTLED):
        state = state.after(2, 400, 2.0)
    assert state.rates == {2: 200.0}


def test_a_small_batch_at_the_end_of_an_epoch_does_not_count_as_another_size() -> None:
    state = Measured()
    for step in range(SKIPPED + SETTLED):
        state = state.after(1, 6 if step % 5 == 4 else 100, 0.06 if step % 5 == 4 else 1.0)
    assert state.rates == {1: 100.0}


def test_each_change_says_what_was_measured() -> None:
    bounds = Bounds(least=1, most=4, efficiency=0.7)

    def settled(*rates: tuple[int, float]) -> SizeChange | None:
        state, change = Measured(), None
        for size, rate in rates:
            for _ in range(SKIPPED + SETTLED):
                state = state.after(size, SAMPLES, SAMPLES / rate)
            state, change = state.decide(100, bounds)
        return change

    assert settled((1, 10.0)) == SizeChange(size=2, why="to measure what one more adds")
    assert settled((1, 10.0), (2, 19.0)) == SizeChange(
        size=3, why="the last 1 worker of 2 adds 90% of what one adds at first"
    )
    assert settled((1, 10.0), (2, 12.0)) == SizeChange(
        size=1, why="the last 1 worker of 2 adds 20% of what one adds at first"
    )
    assert settled((1, 10.0), (2, 16.5)) is None


@given(at=st.integers(1, 12), noise=st.floats(0.0, 0.02), seed=st.integers(0, 1000), least=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_noise_does_not_make_it_go_to_and_fro(at: int, noise: float, seed: int, least: int) -> None:
    found = sizes(saturated(at), 1800, least=least, most=12, noise=noise, seed=seed)
    assert len(changes(found)) <= 14
    assert found[-1] <= max(at + 1, least)
