"""How often a step waits for the device, because Python looks at a value: counted by line on an emulated one.

Steps without a comparison, a rehearsal or a checkpoint. What the script reads is its own, and is not counted.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated.apart import found_by

MOST_ALONE, MOST_TOGETHER = 3, 6
PLACES = ("alone", "with a scaler", "with weights", "first of two", "second of two")
OF_STRATEGIES = ("sums under way", "first of two, sums under way", "second of two, sums under way")
LOCAL = ("local steps", "first of two, local steps", "second of two, local steps")


@pytest.fixture(scope="module")
def counted() -> Any:
    return found_by("counted")


@pytest.fixture(scope="module")
def strategies() -> Any:
    return found_by("counted", "strategies")


def _check(counted: dict[str, Any], where: str) -> None:
    most = MOST_TOGETHER if "two" in where else MOST_ALONE
    assert 1 <= sum(counted[where]["lines"].values()) <= most, counted[where]["lines"]
    assert counted[where]["between"] == 0, "nothing is read between forward and backward"


@pytest.mark.parametrize("where", PLACES)
def test_a_step_reads_a_few_times(counted: dict[str, Any], where: str) -> None:
    _check(counted, where)


@pytest.mark.more
@pytest.mark.parametrize("where", OF_STRATEGIES)
def test_a_step_whose_sum_is_under_way_reads_as_often(strategies: dict[str, Any], where: str) -> None:
    _check(strategies, where)


@pytest.mark.more
@pytest.mark.parametrize("where", LOCAL)
def test_local_steps_read_as_often_as_those_of_one_worker(strategies: dict[str, Any], where: str) -> None:
    """Whatever their number; and a round as often as a step of several."""
    assert 1 <= sum(strategies[where]["inner"].values()) <= MOST_ALONE, strategies[where]["inner"]
    assert 1 <= sum(strategies[where]["around"].values()) <= MOST_TOGETHER, strategies[where]["around"]


def test_what_travels_by_way_of_the_host_is_counted_apart(counted: dict[str, Any]) -> None:
    assert counted["alone"]["staged"] == 0
    assert counted["first of two"]["staged"] > 0


def test_a_weight_that_lies_on_the_device_gives_the_bits_of_one_on_the_cpu(counted: dict[str, Any]) -> None:
    """Also where it is 0, and its loss is not a number."""
    here, there = counted["weighed"]
    assert here == there


def test_what_makes_no_sense_is_refused_at_the_end_of_the_step(counted: dict[str, Any]) -> None:
    not_finite, negative, left_out = counted["refusals"]
    assert "the loss of step 0, micro-batch 2 is nan (samples [4, 5]); nothing was updated" in not_finite
    assert negative == "step 0, micro-batch 2: a weight must be finite and at least 0, got -1.0"
    assert left_out == ""


def test_digests_that_are_taken_on_the_device_are_those_of_the_cpu(counted: dict[str, Any]) -> None:
    assert counted["digests"] == []
