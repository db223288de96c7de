"""The length of a run, as far as its script says it: what the views show as progress and time left."""

from __future__ import annotations

import pytest

from unisono.script.training import Length


def lengths(length: Length, epochs: int, *calls: int) -> list[int | None]:
    """What each call of ``run.steps`` is told to follow it, in an epoch loop with these calls in each epoch."""
    return [length.steps_after(steps, is_limited=False) for _ in length.epochs(epochs) for steps in calls]


def test_an_epoch_loop_has_as_many_steps_in_each_epoch() -> None:
    assert lengths(Length(), 4, 9) == [27, 18, 9, 0]


def test_several_calls_in_an_epoch_are_known_from_the_second_one_on() -> None:
    assert lengths(Length(), 3, 9, 2) == [18, 22, 13, 11, 2, 0]


@pytest.mark.parametrize(("is_limited", "more"), [(True, 0), (False, None)])
def test_a_single_call_is_the_whole_training_if_it_says_how_long_it_is(is_limited: bool, more: int | None) -> None:
    length = Length()
    assert length.steps_after(9, is_limited=is_limited) == more
    assert length.steps_after(9, is_limited=True) is None, "a script with two calls may have a third"


def test_a_loop_that_was_left_says_nothing_about_what_follows() -> None:
    length = Length()
    epochs = length.epochs(10)
    next(epochs)
    epochs.close()  # type: ignore[attr-defined]
    assert length.steps_after(9, is_limited=False) is None


def test_an_epoch_loop_after_another_counts_anew() -> None:
    length = Length()
    assert lengths(length, 2, 100) == [100, 0]
    assert lengths(length, 2, 3) == [3, 0]


def test_a_loop_within_another_is_a_part_of_its_epoch() -> None:
    length = Length()
    found = [length.steps_after(5, is_limited=False) for _ in length.epochs(2) for _ in length.epochs(2)]
    assert found == [5, 10, 5, 0]
