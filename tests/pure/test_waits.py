"""Each member knows for whom it has waited, from the moments that all have told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.waits import NO_WAIT, UNTOLD, Wait, wait_of


def test_all_others_have_waited_for_the_last_one() -> None:
    ready = [0.25, 1.0, 0.5]
    assert [wait_of(rank, ready) for rank in range(3)] == [Wait(1, 0.75), NO_WAIT, Wait(1, 0.5)]


def test_a_member_that_knows_no_moment_does_not_know_its_wait() -> None:
    assert wait_of(0, [UNTOLD, UNTOLD]) == NO_WAIT
    assert wait_of(0, [UNTOLD, 1.0]) == NO_WAIT
    assert wait_of(1, [UNTOLD, 1.0]) == NO_WAIT
    assert wait_of(0, [0.0]) == NO_WAIT


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=6))
def test_whoever_is_ready_waits_until_the_last_one_is(ready: list[float]) -> None:
    for rank, own in enumerate(ready):
        wait = wait_of(rank, ready)
        assert wait.seconds == max(ready) - own
        assert wait.rank == -1 if own == max(ready) else ready[wait.rank] == max(ready)
