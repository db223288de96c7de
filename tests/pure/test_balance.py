"""A plan by pace is as short as any, and all members reach the same one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from unisono.decisions.balance import REST, WARM_UP, WINDOW, Balance, Change, balanced
from unisono.decisions.plan import plan
from unisono.decisions.tree import Node, leaf, missing, outermost, schedule

paces_of = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


@given(paces_of, st.integers(1, 12))
def test_a_balanced_plan_is_within_one_percent_of_the_shortest(paces: tuple[int, ...], num_leaves: int) -> None:
    found = balanced(paces, num_leaves)
    assert missing([node for nodes in found.nodes for node in nodes], num_leaves) == []
    counts = (c for c in itertools.product(range(num_leaves + 1), repeat=len(paces)) if sum(c) == num_leaves)
    best = min(max(n * p for n, p in zip(c, paces, strict=True)) for c in counts)
    length = max(len(own) * pace for own, pace in zip(found.ranges, paces, strict=True))
    assert best <= length <= best * 1.01


@given(paces_of, st.integers(4, 12))
def test_who_shall_show_its_pace_gets_a_micro_batch(paces: tuple[int, ...], num_leaves: int) -> None:
    found = balanced(paces, num_leaves, frozenset(range(len(paces))))
    assert all(len(own) >= 1 for own in found.ranges)


def observe(balance: Balance, paces: list[float], num_leaves: int, steps: int = 1) -> list[int]:
    """Let members of these paces make steps; returns how many leaves each had in the last."""
    counts: list[int] = []
    for _ in range(steps):
        counts = [len(own) for own in balance.decide(num_leaves).ranges]
        balance.observe(counts, [n * pace for n, pace in zip(counts, paces, strict=True)])
    return counts


def test_a_slow_member_gets_less_within_a_few_steps_and_more_again_when_it_is_fast() -> None:
    balance = Balance(2)
    assert observe(balance, [1.0, 1.0], 12, 10) == [6, 6]
    assert observe(balance, [1.0, 2.0], 12, 4) == [8, 4]
    assert observe(balance, [1.0, 1.0], 12, 4) == [6, 6]


def test_noise_moves_no_work() -> None:
    balance = Balance(4)
    noise = itertools.cycle([1.0, 1.03, 0.98, 1.01, 0.97, 1.02, 1.0])
    for _ in range(200):
        paces = [next(noise) for _ in range(4)]
        assert observe(balance, paces, 16) == [4, 4, 4, 4]


def test_one_slow_step_moves_no_work() -> None:
    balance = Balance(2)
    observe(balance, [1.0, 1.0], 8, 10)
    observe(balance, [1.0, 9.0], 8)
    assert observe(balance, [1.0, 1.0], 8, 3) == [4, 4]


def test_the_first_steps_and_few_steps_do_not_count() -> None:
    balance = Balance(2)
    assert observe(balance, [1.0, 50.0], 8, WARM_UP) == [4, 4]
    assert observe(balance, [1.0, 1.0], 8, WINDOW) == [4, 4]


def test_a_member_too_slow_to_help_rests_and_is_tried_again() -> None:
    balance = Balance(2)
    assert observe(balance, [1.0, 30.0], 8, 10) == [8, 0]
    seen = [observe(balance, [1.0, 1.0], 8) for _ in range(REST + WINDOW + 2)]
    assert [8, 0] in seen
    assert seen[-1] == [4, 4]


def test_members_that_see_the_same_decide_the_same_whenever_they_look_ahead() -> None:
    one, other = Balance(3), Balance(3)
    for step in range(60):
        paces = [1.0 + (step % 7) / 3, 1.0 + (step % 5) / 2, 1.0]
        if step % 2:
            other.peek(8)
        first, second = one.decide(8), other.decide(8)
        assert first.ranges == second.ranges
        counts = [len(own) for own in first.ranges]
        seconds = [n * pace for n, pace in zip(counts, paces, strict=True)]
        one.observe(counts, seconds)
        other.observe(counts, seconds)


def test_without_knowledge_the_plan_is_even() -> None:
    assert Balance(3).decide(8) == plan(3, 8)


def test_another_pace_is_seen_after_two_steps() -> None:
    balance = Balance(2)
    observe(balance, [1.0, 1.0], 12, 10)
    assert observe(balance, [1.0, 2.0], 12, 3) == [8, 4]


def test_a_change_says_who_is_slow_and_who_is_not_any_more() -> None:
    balance = Balance(3)
    observe(balance, [1.0, 1.0, 1.0], 12, 10)
    assert balance.change is None
    said = []
    for paces in ([1.0, 2.1, 1.0], [1.0, 1.0, 1.0]):
        for _ in range(6):
            observe(balance, paces, 12)
            if balance.change is not None:
                said.append(balance.change.say(["w0", "w3", "w5"]))
    assert said == [
        "w3 takes 2.1x as long as the others for a micro-batch: it gets 2 of 12 now",
        "w3 is as fast as the others again: it gets 4 of 12 now",
    ]


def test_a_change_without_a_slow_member_says_the_shares() -> None:
    change = Change((5, 4, 3), (0.9, 1.0, 1.15), frozenset())
    assert change.say(["w0", "w1", "w2"]) == "the 12 micro-batches follow the workers' paces: w0 5, w1 4, w2 3"


@given(st.integers(1, 40), st.data())
def test_the_outermost_nodes_have_all_leaves_once(num_leaves: int, data: st.DataObject) -> None:
    """Also when several members have computed the same leaves, as long as every leaf has been computed."""
    held: list[Node] = []
    shares: list[list[int]] = [[], [], []]
    for index in range(num_leaves):
        for member in data.draw(st.sets(st.integers(0, 2), min_size=1)):
            shares[member].append(index)
    for share in shares:
        held += schedule([leaf(index, num_leaves) for index in share], num_leaves)[1]
    assert missing(outermost(held), num_leaves) == []
