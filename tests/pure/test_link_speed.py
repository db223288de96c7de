"""How fast a link is: only what it carried while it had something to carry says that."""

from __future__ import annotations

import pytest

from unisono.core.link_speed import LEAST_TIMES, Counted, LinkSpeed, LinkUse

MB = 1_000_000
FAST = 5000 * MB
"""Of the kernel's estimate, bytes in a second."""


def seen(acknowledged: int, *, under_way: int = 50, unsent: int = 0, held_up: int = 0, rate: int = FAST) -> Counted:
    return Counted(acknowledged, under_way, unsent, held_up, rate)


def looks(*counted: Counted, each_s: float = 0.01) -> list[LinkUse]:
    speed = LinkSpeed()
    speed.note(0.0, {1: seen(0, under_way=0)})
    speed.take()
    for number, one in enumerate(counted, 1):
        speed.note(each_s * number, {1: one})
    return speed.take()


def speed_of(uses: list[LinkUse]) -> float:
    return uses[0].nbytes / uses[0].seconds


def test_a_link_that_was_busy_at_all_looks_is_as_fast_as_data_arrived() -> None:
    uses = looks(*(seen(number * MB // 10) for number in range(1, 6)))
    assert uses[0].nbytes == MB // 2
    assert speed_of(uses) == pytest.approx(10 * MB)


def test_data_that_wait_to_be_sent_are_enough() -> None:
    assert speed_of(
        looks(*(seen(number * MB // 10, under_way=0, unsent=1) for number in range(1, 6)))
    ) == pytest.approx(10 * MB)


@pytest.mark.parametrize("change", [{"under_way": 2}, {"under_way": 0}])
def test_a_link_that_had_nothing_to_carry_is_as_fast_as_the_kernel_says(change: dict[str, int]) -> None:
    """The last acknowledgement may be late; then there was nothing to send."""
    assert speed_of(looks(*(seen(number * MB // 10, **change) for number in range(1, 6)))) == pytest.approx(FAST)


def test_times_in_which_the_receiver_had_no_room_do_not_count() -> None:
    assert speed_of(looks(*(seen(number * MB // 10, held_up=number) for number in range(1, 6)))) == pytest.approx(FAST)


def test_too_few_times_do_not_count() -> None:
    few = [seen(number * MB // 10) for number in range(1, LEAST_TIMES + 1)]  # between the first two looks it was idle
    assert speed_of(looks(*few)) == pytest.approx(FAST)


def test_a_time_in_which_a_process_waited_does_not_count() -> None:
    """Of five times between looks, two have carried next to nothing."""
    carried = [0, 100, 100, 200, 201, 301]
    assert speed_of(looks(*(seen(each * MB // 1000) for each in carried))) == pytest.approx(10 * MB)


def test_nothing_is_said_where_the_kernel_says_nothing() -> None:
    assert looks(seen(MB, under_way=0, rate=0)) == []
    assert LinkSpeed().take() == []


def test_what_was_taken_is_not_taken_again() -> None:
    speed = LinkSpeed()
    for number in range(6):
        speed.note(0.01 * number, {1: seen(number * MB // 10)})
    assert speed.take()[0].nbytes == MB // 2
    assert speed.take()[0].nbytes == 0
