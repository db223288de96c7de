"""A link or a worker that makes steps longer is named once while it does so, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest

from unisono.cli.status import _words as status_words
from unisono.decisions.links import IN_A_ROW, KNOWN, WARM_UP, Slowness
from unisono.events import Announcement, LinkSlow, Seconds, WorkerTimes

HOSTS = {"w0": "a", "w1": "b", "w2": "c"}
CALM = WARM_UP + IN_A_ROW + KNOWN
"""So many steps, and what is usual is known."""
LOOKS_TO_BE_WELL = 10
"""Of steps of 0.2 s."""
MEGABYTE = 1_000_000

Step = dict[str, WorkerTimes]


def sending(*, busy_s: float = 0.008, back_s: float = 0.008, step_s: float = 0.2) -> Step:
    """A step of two workers, whose link from w0 to w1 is busy for so long; and the way back."""
    network = max(busy_s, back_s)
    last = Seconds(compute=step_s, network=network)
    return {
        "w0": WorkerTimes(leaves=4, compute=0.2, last=last, link_to="w1", link_s=busy_s, link_bytes=MEGABYTE),
        "w1": WorkerTimes(leaves=4, compute=0.2, last=last, link_to="w0", link_s=back_s, link_bytes=MEGABYTE),
    }


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


def told(slowness: Slowness, steps: Iterable[Step]) -> Iterator[tuple[int, LinkSlow | Announcement]]:
    """What is said, with the number of the step after which it is said."""
    for number, step in enumerate(steps):
        for event in slowness.observe(step, HOSTS):
            yield number, event


def test_a_link_that_becomes_slow_is_named_once_and_once_when_it_is_over() -> None:
    steps = [sending()] * CALM + [sending(busy_s=0.84)] * 20 + [sending()] * 10
    (begun, slow), (ended, over) = told(Slowness(), steps)
    assert begun == CALM + IN_A_ROW - 1
    assert isinstance(slow, LinkSlow)
    assert (slow.source, slow.target, slow.is_over) == ("a", "b", False)
    assert slow.bytes_per_s == pytest.approx(MEGABYTE / 0.84)
    assert slow.usual_bytes_per_s == pytest.approx(MEGABYTE / 0.008, rel=0.01)
    assert slow.seconds == pytest.approx(0.832)
    assert ended == CALM + 20 + LOOKS_TO_BE_WELL - 1
    assert isinstance(over, LinkSlow)
    assert over.is_over


def test_a_slow_link_of_a_host_that_is_gone_is_over_and_forgotten() -> None:
    slowness = Slowness()
    ((_, slow),) = told(slowness, [sending()] * CALM + [sending(busy_s=0.84)] * 20)
    assert isinstance(slow, LinkSlow)
    left = {"w0": WorkerTimes(leaves=8, compute=0.2, last=Seconds(compute=0.2))}
    ((_, over),) = told(slowness, [left] * 5)
    assert isinstance(over, LinkSlow)
    assert (over.source, over.target, over.is_over) == ("a", "b", True)
    assert slowness._links == {}


def test_one_slow_step_says_nothing() -> None:
    steps = ([sending()] * CALM + [sending(busy_s=0.84)] * (IN_A_ROW - 1)) * 3
    assert list(told(Slowness(), steps)) == []


def test_a_link_near_the_limit_is_named_at_most_once() -> None:
    """Rates that go to and fro around the limit are no change."""
    steps = [sending()] * CALM + [sending(busy_s=0.84)] * 5 + [sending(busy_s=0.0155), sending(busy_s=0.1)] * 40
    assert len(list(told(Slowness(), steps))) == 1


def test_the_way_back_that_only_waits_for_confirmations_is_not_named() -> None:
    steps = [sending()] * CALM + [sending(busy_s=0.84, back_s=0.3)] * 20
    assert [event.source for _, event in told(Slowness(), steps) if isinstance(event, LinkSlow)] == ["a"]


def test_a_link_that_is_busy_longer_behind_the_computation_makes_no_step_longer() -> None:
    """The network part of the step has not grown: backward takes as long."""
    hidden = sending(busy_s=0.1)
    hidden = {
        worker_id: WorkerTimes(
            leaves=4, compute=0.2, last=Seconds(compute=0.2), link_to=times.link_to, link_s=0.1, link_bytes=MEGABYTE
        )
        for worker_id, times in hidden.items()
    }
    assert list(told(Slowness(), [sending()] * CALM + [hidden] * 20)) == []


def test_a_link_that_was_never_faster_is_held_against_the_others() -> None:
    (_, slow), *more = told(Slowness(), [sending(busy_s=0.84)] * 40)
    assert more == []
    assert isinstance(slow, LinkSlow)
    assert (slow.source, slow.usual_bytes_per_s) == ("a", pytest.approx(MEGABYTE / 0.008))


def test_workers_of_one_host_are_no_link() -> None:
    steps = [sending()] * CALM + [sending(busy_s=0.84)] * 20
    slowness = Slowness()
    assert [said for step in steps for said in slowness.observe(step, dict.fromkeys(HOSTS, "a"))] == []


def test_a_worker_that_becomes_slow_is_named_with_what_each_step_waits_for_it() -> None:
    fast, slow = computing(0.1, 0.1, 0.1), computing(0.1, 0.1, 0.3)
    (begun, named), (ended, over) = told(Slowness(), [fast] * CALM + [slow] * 20 + [fast] * 15)
    assert begun == CALM + IN_A_ROW - 1
    assert ended - (CALM + 20 + LOOKS_TO_BE_WELL) in (-1, 0)  # ten times 0.2 are a little less than 2
    assert isinstance(named, Announcement)
    assert isinstance(over, Announcement)
    assert named.text == (
        "w2 on c takes 3.0x as long for a micro-batch as before (300 ms instead of 100 ms): "
        "the others wait 400 ms for it in each step"
    )
    assert over.text == "w2 on c is not slow any more: 100 ms for a micro-batch"


def test_a_worker_that_was_always_slow_is_held_against_the_others() -> None:
    (_, named), *more = told(Slowness(), [computing(0.1, 0.1, 0.3)] * 40)
    assert more == []
    assert isinstance(named, Announcement)
    assert "3.0x as long for a micro-batch as the others" in named.text


def test_a_slow_worker_for_which_nobody_waits_is_not_named() -> None:
    """It has got fewer micro-batches already."""
    step = computing(0.1, 0.1, 0.1)
    step["w2"] = WorkerTimes(leaves=1, compute=0.2, last=Seconds(compute=0.2))
    assert list(told(Slowness(), [computing(0.1, 0.1, 0.1)] * CALM + [step] * 20)) == []


def test_a_worker_stays_known_when_others_come_and_go() -> None:
    """What was said of it is not said again, and its end is said."""
    slowness, slow = Slowness(), computing(0.1, 0.1, 0.3)
    begun = list(told(slowness, [computing(0.1, 0.1, 0.1)] * CALM + [slow] * 10))
    assert len(begun) == 1
    fewer = [{worker_id: step[worker_id] for worker_id in ("w0", "w2")} for step in [slow] * 10]
    assert list(told(slowness, fewer)) == []
    assert len(list(told(slowness, [computing(0.1, 0.1, 0.1)] * 15))) == 1


def test_what_goes_to_and_fro_is_said_less_and_less_often() -> None:
    """Well for 3 s in turns with slow for 6 s: that is enough to be called well once, and not twice."""
    turn = [computing(0.1, 0.1, 0.3)] * 10 + [computing(0.1, 0.1, 0.1)] * 15
    assert len(list(told(Slowness(), [computing(0.1, 0.1, 0.1)] * CALM + turn * 30))) == 3


def test_what_is_slow_for_less_than_a_second_is_not_named() -> None:
    """Short steps: three looks are soon taken."""
    fast, slow = computing(0.02, 0.02), computing(0.02, 0.06)
    assert list(told(Slowness(), ([fast] * 40 + [slow] * 7) * 10)) == []


def test_short_steps_are_looked_at_rarely() -> None:
    """Many short steps cost no more than few long ones."""
    slowness, looks = Slowness(), 0
    for _ in range(1000):
        before = slowness._unseen_s
        slowness.observe(computing(0.0005, 0.0005), HOSTS)
        looks += slowness._unseen_s < before
    assert 5 <= looks <= 20


def test_the_status_names_the_links_that_are_slow_now() -> None:
    def slow(source: str, *, is_over: bool = False) -> LinkSlow:
        return LinkSlow(
            time=1.0, source=source, target="b", bytes_per_s=1e6, usual_bytes_per_s=9e6, seconds=0.5, is_over=is_over
        )

    told = [slow("a"), slow("c"), slow("a", is_over=True)]
    found = {"state": "training", "events": [msgspec.to_builtins(each) for each in told]}
    lines = [line for line in status_words(found) if "the network" in line]
    assert lines == ["the network from c to b is slow: 1.0 MB/s instead of 9.0; each step takes 0.500 s longer"]
