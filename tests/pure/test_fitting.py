"""Sizes of a micro-batch: what is tried next never needs more memory than there is, by what was seen before."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.test_forecast import facts
from unisono.tools.plan.finder import Search, shown_search, with_search
from unisono.tools.plan.fitting import SPARE, Tried, expected_peak, fastest, largest, next_size, sizes_for
from unisono.tools.plan.forecast import Roster

FIXED = 1000
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def tried_all(start: int, limit: int, *, each: int, seconds: float = 1.0, to_the_limit: bool) -> list[Tried]:
    """Return what is tried where a sample needs so many bytes and a micro-batch so many seconds beside a fixed one."""
    found: list[Tried] = []
    size: int | None = start
    while size is not None:
        peak = FIXED + each * size
        assert not found or size < found[0].size or peak <= SPARE * limit, "a size that does not fit was tried"
        found.append(Tried(size=size, seconds=1.0 + seconds * size, peak=peak))
        size = next_size(found, SIZES, fixed=FIXED, limit=limit, to_the_limit=to_the_limit)
    return found


@given(each=st.integers(1, 500), limit=st.integers(2000, 200_000), start=st.sampled_from(SIZES[:5]))
def test_no_size_is_tried_that_needs_more_memory_than_there_is(each: int, limit: int, start: int) -> None:
    tried_all(start, limit, each=each, to_the_limit=True)


def test_the_largest_size_that_fits_is_found() -> None:
    found = largest(tried_all(4, 10_000, each=100, to_the_limit=True))
    assert found is not None
    assert found.size == 64  # 7400 bytes of 8000; 128 would need 13,800


def test_larger_sizes_are_tried_only_as_long_as_they_are_faster() -> None:
    sizes = [one.size for one in tried_all(8, 1 << 30, each=1, seconds=1.0, to_the_limit=False)]
    assert max(sizes) == 64, "32 samples in 33 s, 64 in 65 s: that is less than 3% more"
    assert min(sizes) == 4, "8 samples in 9 s are 0.89 a second, 4 in 5 s are 0.8"


def test_a_size_that_needs_more_than_its_samples_is_expected() -> None:
    two = [Tried(size=4, seconds=1.0, peak=1400), Tried(size=8, seconds=1.0, peak=2000)]
    assert expected_peak(two[:1], FIXED, 8) == 1800
    assert expected_peak(two, FIXED, 16) == pytest.approx(2000 + 1.1 * 1200)


def test_a_size_that_did_not_fit_ends_the_search_upwards() -> None:
    failed = [Tried(size=8, seconds=1.0, peak=2000), Tried(size=16, seconds=math.inf, peak=0)]
    assert next_size(failed, SIZES, fixed=FIXED, limit=None, to_the_limit=True) == 4
    found = fastest(failed)
    assert found is not None
    assert found.size == 8


@pytest.mark.parametrize(
    ("batch", "start", "wanted"),
    [
        (128, 16, [1, 2, 4, 8, 16, 32, 64, 128]),
        (96, 8, [1, 2, 4, 8, 16, 32, 48, 96]),
        (7, 1, [1, 7]),
        (13, 13, [1, 13]),
    ],
)
def test_sizes_divide_the_batch_and_are_about_twice_each_other(batch: int, start: int, wanted: list[int]) -> None:
    found = sizes_for(batch, start, batch)
    assert all(batch % size == 0 for size in found)
    assert start in found
    assert found == wanted or set(found) <= set(wanted)


def test_a_finder_whose_first_trial_failed_says_why() -> None:
    made = Search(tried=(), fixed=FIXED, limit=4000, batch_size=128, microbatches=8, stopped="with 8 samples it broke")
    text = shown_search(made, facts(), Roster(workers=2, per_host=4), ["microbatches"])
    assert text == "Nothing was found: with 8 samples it broke"


def test_what_changes_the_training_is_said_and_not_done() -> None:
    known = facts()
    made = Search(
        tried=[
            Tried(size=8, seconds=0.008, peak=1500),
            Tried(size=16, seconds=0.010, peak=2000),
            Tried(size=32, seconds=0.012, peak=3000),
        ],
        fixed=FIXED,
        limit=4000,
        batch_size=128,
        microbatches=8,
    )
    assert with_search(known, made).paces == {16: 0.008, 8: 0.010, 4: 0.012}
    text = shown_search(made, known, Roster(workers=2, per_host=4), ["microbatches", "batch"])
    assert "run.steps(..., batch_size=128, microbatches=4)" in text
    assert "it changes the result's bits and BatchNorm's statistics" in text
    assert "run.steps(..., batch_size=256, microbatches=8)" in text
    assert "a different training" in text
    assert text.endswith("Nothing was changed.")
