"""Where a replay begins, what it looks at, and what of a step must be equal."""

from __future__ import annotations

import pytest

from unisono.core.errors import UsageError
from unisono.core.events import EQUAL_FIELDS
from unisono.core.fingerprints import other_arithmetic
from unisono.core.replay_rules import (
    Replay,
    ReplayStart,
    find_difference,
    seconds_left,
    starts,
    with_words,
)


def test_a_replay_begins_at_the_newest_checkpoint_before_the_step() -> None:
    found = [ReplayStart("a", 10), ReplayStart("b", 30), ReplayStart("c", 20)]
    assert [one.path for one in starts(found, 25)] == ["c", "a"]
    assert [one.path for one in starts(found, 30)] == ["b", "c", "a"], "the state before the step itself"
    assert starts(found, 9) == []


def test_steps_that_are_under_way_in_a_checkpoint_are_computed_again_from_an_older_one() -> None:
    found = [ReplayStart("a", 10, delay=2), ReplayStart("b", 20, delay=2)]
    assert [one.path for one in starts(found, 21)] == ["a"], "b holds the gradients of the steps 20 and 21"
    assert [one.path for one in starts(found, 22)] == ["b", "a"]


def test_the_first_value_that_differs_is_named_and_what_an_old_line_lacks_is_not_compared() -> None:
    line = dict.fromkeys(EQUAL_FIELDS, 1)
    assert find_difference(line, line) == ""
    assert find_difference(line, {**line, "loss": 2, "weight": 2}) == "loss"
    assert find_difference({"step": 1, "digest": "a"}, {**line, "digest": "a"}) == ""


def test_only_the_micro_batch_that_was_asked_for_is_looked_at() -> None:
    place = {"step": 4, "turn": 0, "leaf": 2, "replica": -1, "inner": -1}
    assert not Replay(run="", step=4).is_wanted(**place)
    asked = Replay(run="", step=4, leaf=2, looks=True)
    assert asked.is_wanted(**place)
    for name, other in (("step", 3), ("turn", 1), ("leaf", 1)):
        assert not asked.is_wanted(**{**place, name: other})
    assert Replay(run="", step=4, looks=True).is_wanted(**place), "all of the step"
    inner = Replay(run="", step=4, replica=1, inner=3, looks=True)
    assert inner.is_wanted(**{**place, "replica": 1, "inner": 3})
    assert not inner.is_wanted(**{**place, "replica": 0, "inner": 3})


def test_what_a_replay_does_is_read_from_words() -> None:
    assert with_words(["anomaly", "save=a=b"]) == {"anomaly": True, "save": "a=b"}
    for wrong in ("save", "save=", "anomaly=1", "gdb"):
        with pytest.raises(UsageError, match="--with takes anomaly, debugger, or save=DIR"):
            with_words([wrong])


def test_the_time_that_is_left_follows_the_pace_so_far() -> None:
    assert seconds_left(0, 10, 5.0) is None
    assert seconds_left(4, 10, 2.0) == 3.0


def test_what_differs_between_two_arithmetics_is_said() -> None:
    before = {"torch": "2.12", "threads": "1"}
    assert other_arithmetic(before, before) == []
    assert other_arithmetic({}, before) == [], "an old run does not say"
    assert other_arithmetic(before, {"torch": "2.13", "threads": "1", "cuda": "12"}) == [
        "cuda: none then, 12 now",
        "torch: 2.12 then, 2.13 now",
    ]
