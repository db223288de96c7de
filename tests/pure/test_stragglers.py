"""A worker that makes steps longer is named once while it does so, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unisono.core.events import Announcement, Seconds, WorkerTimes
from unisono.core.stragglers import IN_A_ROW, KNOWN, WARM_UP, Stragglers

HOSTS = {"w0": "a", "w1": "b", "w2": "c"}
CALM = WARM_UP + IN_A_ROW + KNOWN
"""So many steps, and what is usual is known."""
LOOKS_TO_BE_WELL = 10
"""Of steps of 0.2 s."""

Step = dict[str, WorkerTimes]


def computing(*paces: float, leaves: int = 2) -> Step:
    """A step of workers that take so long for a micro-batch, and wait for the slowest."""
    took = [pace * leaves for pace in paces]
    slowest = took.index(max(took))
    return {
        f"w{rank}": WorkerTimes(
            leaves=leaves,
            compute=seconds,
            last=Seconds(compute=seconds, waiting=max(took) - seconds),
            waits_for=f"w{slowest}" if rank != slowest else "",
            waits_s=max(took) - seconds,
        )
        for rank, seconds in enumerate(took)
    }


def told(stragglers: Stragglers, steps: Iterable[Step]) -> Iterator[tuple[int, Announcement]]:
    """What is said, with the number of the step after which it is said."""
    for number, step in enumerate(steps):
        for event in stragglers.observe(step, HOSTS):
            yield number, event


def test_a_worker_that_becomes_slow_is_named_with_what_each_step_waits_for_it() -> None:
    fast, slow = computing(0.1, 0.1, 0.1), computing(0.1, 0.1, 0.3)
    (begun, named), (ended, over) = told(Stragglers(), [fast] * CALM + [slow] * 20 + [fast] * 15)
    assert begun == CALM + IN_A_ROW - 1
    assert ended - (CALM + 20 + LOOKS_TO_BE_WELL) in (-1, 0)  # ten times 0.2 are a little less than 2
    assert named.text == (
        "w2 on c takes 3.0x as long for a micro-batch as before (300 ms instead of 100 ms): "
        "the others wait 400 ms for it in each step"
    )
    assert over.text == "w2 on c is no longer slow: 100 ms for a micro-batch"


def test_one_slow_step_says_nothing() -> None:
    steps = ([computing(0.1, 0.1)] * CALM + [computing(0.1, 0.3)] * (IN_A_ROW - 1)) * 3
    assert list(told(Stragglers(), steps)) == []


def test_a_worker_that_was_always_slow_is_held_against_the_others() -> None:
    (_, named), *more = told(Stragglers(), [computing(0.1, 0.1, 0.3)] * 40)
    assert more == []
    assert "3.0x as long for a micro-batch as the others" in named.text


def test_a_slow_worker_for_which_nobody_waits_is_not_named() -> None:
    """It has got fewer micro-batches already."""
    step = computing(0.1, 0.1, 0.1)
    step["w2"] = WorkerTimes(leaves=1, compute=0.2, last=Seconds(compute=0.2))
    assert list(told(Stragglers(), [computing(0.1, 0.1, 0.1)] * CALM + [step] * 20)) == []


def test_a_worker_stays_known_when_others_come_and_go() -> None:
    """What was said of it is not said again, and its end is said."""
    stragglers, slow = Stragglers(), computing(0.1, 0.1, 0.3)
    begun = list(told(stragglers, [computing(0.1, 0.1, 0.1)] * CALM + [slow] * 10))
    assert len(begun) == 1
    fewer = [{worker_id: step[worker_id] for worker_id in ("w0", "w2")} for step in [slow] * 10]
    assert list(told(stragglers, fewer)) == []
    assert len(list(told(stragglers, [computing(0.1, 0.1, 0.1)] * 15))) == 1


def test_what_goes_to_and_fro_is_said_less_and_less_often() -> None:
    """Well for 3 s in turns with slow for 6 s: that is enough to be called well once, and not twice."""
    turn = [computing(0.1, 0.1, 0.3)] * 10 + [computing(0.1, 0.1, 0.1)] * 15
    assert len(list(told(Stragglers(), [computing(0.1, 0.1, 0.1)] * CALM + turn * 30))) == 3


def test_what_is_slow_for_less_than_a_second_is_not_named() -> None:
    """Short steps: three looks are soon taken."""
    fast, slow = computing(0.02, 0.02), computing(0.02, 0.06)
    assert list(told(Stragglers(), ([fast] * 40 + [slow] * 7) * 10)) == []


def test_short_steps_are_looked_at_rarely() -> None:
    """Many short steps cost no more than few long ones."""
    stragglers, looks = Stragglers(), 0
    for _ in range(1000):
        before = stragglers._unseen_s
        stragglers.observe(computing(0.0005, 0.0005), HOSTS)
        looks += stragglers._unseen_s < before
    assert 5 <= looks <= 20
