"""When a run says that its micro-batches are too small, and with which number they would not be."""

from __future__ import annotations

import pytest

from unisono.core.small import MATTERS_S, WARM_UP, OwnWork


def work(own_ms: float, script_ms: float, number: int = 10_000) -> OwnWork:
    found = OwnWork()
    for _ in range(number + WARM_UP):
        found.note(own_ms / 1e3, script_ms / 1e3)
    return found


def test_small_micro_batches_are_told_once_with_the_numbers_and_a_better_number() -> None:
    found = work(0.5, 1.25)
    assert found.advice(32, 2) == (
        "micro-batches are small: for each, Unisono's own work takes 0.50 ms, beside 1.25 ms of the script (40%). "
        "microbatches=4 would take less time than 32, with different bits (docs/choosing_m.md)"
    )
    assert found.advice(32, 2) == ""


@pytest.mark.parametrize(("microbatches", "workers", "better"), [(8, 1, 1), (8, 4, 4), (32, 2, 4), (6, 5, 5)])
def test_the_better_number_is_a_multiple_of_the_workers(microbatches: int, workers: int, better: int) -> None:
    assert f"microbatches={better} would" in work(0.5, 1.25).advice(microbatches, workers)


def test_nothing_is_told_where_it_does_not_matter() -> None:
    assert work(0.5, 10.0).advice(8, 2) == ""  # 5%
    assert work(0.5, 1.0).advice(2, 2) == ""  # fewer cannot be
    assert work(0.5, 1.0, int(1e3 * MATTERS_S)).advice(8, 2) == ""  # half of that time
