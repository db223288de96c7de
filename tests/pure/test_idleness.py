"""Whether anybody uses a machine: every change, and that a moment of load does not make it go to and fro."""

from __future__ import annotations

import math

from unisono.decisions.idleness import LOUD_LOOKS, Idleness, Limits, Look

LIMITS = Limits(idle_s=10.0, load=1.0)
START = 100.0


def watched(*looks: tuple[float, float, float], state: Idleness | None = None) -> list[bool]:
    """Whether the machine is idle after each look: its time, that of the last input, and the load."""
    state = state or Idleness(used_at=START)
    found = []
    for at, input_at, load in looks:
        state = state.after(Look(at=at, input_at=input_at, load=load), LIMITS)
        found.append(state.is_idle)
    return found


def idle() -> Idleness:
    return Idleness(used_at=START, is_idle=True)


def test_a_machine_is_idle_after_a_time_without_input_and_load() -> None:
    assert watched(*((START + at, -math.inf, 0.0) for at in (1, 9.9, 10, 11))) == [False, False, True, True]


def test_the_time_begins_again_with_each_input_and_each_load() -> None:
    looks = [(105, 104, 0.0), (110, 104, 0.0), (113.9, 104, 0.0), (114, 104, 0.0)]
    assert watched(*looks) == [False, False, False, True]
    looks = [(105, 0, 0.6), (114, 0, 0.4), (115, 0, 0.4)]
    assert watched(*looks) == [False, False, True]


def test_the_first_input_ends_it() -> None:
    assert watched((200, 199.5, 0.0), (201, 199.5, 0.0), state=idle()) == [False, False]
    assert watched((200, START, 0.0), state=idle()) == [True], "the last one before it was idle"


def test_load_ends_it_only_when_it_lasts() -> None:
    loud = [(200.0 + number, 0.0, 2.0) for number in range(LOUD_LOOKS)]
    assert watched(*loud, state=idle()) == [True] * (LOUD_LOOKS - 1) + [False]
    broken = [*loud[:-1], (210.0, 0.0, 0.9), *((211.0 + number, 0.0, 2.0) for number in range(LOUD_LOOKS - 1))]
    assert all(watched(*broken, state=idle()))


def test_between_the_two_limits_nothing_changes() -> None:
    looks = [(START + at, 0.0, 0.8) for at in range(50)]
    assert not any(watched(*looks))
    assert all(watched(*looks, state=idle()))


def test_each_change_says_why() -> None:
    state = Idleness(used_at=START).after(Look(at=START + 10), LIMITS)
    assert state.why == "nobody has used it for 10 s"
    assert state.after(Look(at=120, input_at=120), LIMITS).why == "somebody uses it"
    for _ in range(LOUD_LOOKS):
        state = state.after(Look(at=120, load=2.34), LIMITS)
    assert state.why == "other processes use 2.3 cores"
