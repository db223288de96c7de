"""What is said of refused connections: the first, and then their number."""

from __future__ import annotations

from collections.abc import Callable

from unisono.cluster.head.door import EVERY_S, Refusals


def test_a_thousand_attempts_are_two_lines() -> None:
    told: list[str] = []
    waiting: list[Callable[[], None]] = []
    now = 0.0

    def later(seconds: float, call: Callable[[], None]) -> None:
        assert seconds == EVERY_S
        waiting.append(call)

    def minute() -> None:
        nonlocal now
        now += EVERY_S
        waiting.pop()()

    refusals = Refusals(told.append, later, lambda: now)
    for _ in range(900):
        refusals.note("without the run's token", "10.0.0.7")
    for _ in range(101):
        refusals.note("that used a different protocol", "10.0.0.8")
    assert told == ["the head rejected a connection without the run's token, from 10.0.0.7; the run continues"]
    minute()
    assert told[1:] == [
        "the head rejected 1000 more connections in 60 s (899 without the run's token and 101 that used a different "
        "protocol), the last from 10.0.0.8"
    ]
    minute()
    assert not waiting, "nothing happens where nobody comes"
    assert len(told) == 2
    refusals.note("without the run's token", "10.0.0.9")
    minute()
    assert told[2:] == ["the head rejected a connection without the run's token, from 10.0.0.9; the run continues"]
