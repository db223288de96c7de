"""When the agent of a lost machine is started again: the pauses, one after the other."""

from __future__ import annotations

from unisono.cluster.launchers.fleet import FIRST_S, LIVED_S, MOST_S, Attempts


def test_the_pause_grows_with_each_agent_that_fails_up_to_a_most() -> None:
    attempts, now, pauses = Attempts(started_at=0.0), 0.0, []
    assert not attempts.is_due(1e9), "it runs"
    for _ in range(8):
        attempts = attempts.ended(now)
        assert not attempts.is_due(now)
        now += attempts.pause_s
        assert attempts.is_due(now)
        pauses.append(attempts.pause_s)
        attempts = attempts.started(now)
        assert not attempts.is_due(now + 1e9)
    assert pauses == [FIRST_S, 10.0, 20.0, 40.0, 80.0, 160.0, MOST_S, MOST_S]


def test_an_agent_that_has_lived_has_not_failed() -> None:
    attempts = Attempts(started_at=0.0, num_failed=6).ended(LIVED_S)
    assert attempts.pause_s == FIRST_S
    again = attempts.started(LIVED_S + FIRST_S).ended(LIVED_S + FIRST_S)
    assert again.pause_s == FIRST_S, "the first that fails"
