"""The window of a stream is the one with which streams take the least time; it says nothing of what is sent."""

from __future__ import annotations

import pytest

from unisono.exchange.window import CHOICES, TRIES, WARM_UP, Window

TRIALS = WARM_UP + TRIES * len(CHOICES)


def choices_with(seconds: dict[int, float], number: int, *, members: int = 3) -> list[int]:
    """The windows of so many streams, each of which takes as long as its window says."""
    window, found = Window(members), []
    for _ in range(number):
        found.append(window.of_next(40))
        window.observe(found[-1], seconds.get(found[-1], 1.0))
    return found


def test_two_members_send_all_they_have() -> None:
    assert set(choices_with({}, 30, members=2)) == {40}


def test_a_short_stream_is_sent_at_once() -> None:
    assert Window(5).of_next(2) == 2


def test_all_members_try_the_same_windows_in_the_same_streams() -> None:
    """Whatever they measure."""
    assert choices_with({2: 9.0}, TRIALS) == choices_with({16: 5.0}, TRIALS)


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ({2: 0.4, 4: 0.5, 16: 0.6}, 2),
        ({2: 0.6, 4: 0.5, 16: 0.4}, 16),
        ({2: 0.6, 4: 0.4, 16: 0.4}, 4),
        ({2: 0.4, 4: 0.399, 16: 0.398}, 2),
    ],
)
def test_the_smallest_window_of_the_fast_ones_is_kept(seconds: dict[int, float], kept: int) -> None:
    assert choices_with(seconds, TRIALS + 5)[TRIALS:] == [kept] * 5
