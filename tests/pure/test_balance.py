"""A plan by pace is as short as any, and all members reach the same one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.balance import REST, SELDOM_S, WARM_UP, WINDOW, Balance, ShareChange, ToldShares, balanced, weighed
from unisono.core.plan import Plan, plan
from unisono.core.tree import Node, leaf, leaves, outermost, schedule

paces_of = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


@st.composite
def teams(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[range, ...]]:
    """Members of some paces, on some hosts."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    edges = [0, *itertools.accumulate(sizes)]
    paces = draw(st.lists(st.integers(1, 12), min_size=edges[-1], max_size=edges[-1]))
    return tuple(paces), tuple(range(a, b) for a, b in itertools.pairwise(edges))


def time_of(found: Plan, paces: Sequence[float], hosts: Sequence[range], node_cost: float) -> float:
    """What the slowest member computes, and the host with most nodes sends."""
    computing = max(len(own) * pace for own, pace in zip(found.ranges, paces, strict=True))
    sent = [schedule([node for rank in host for node in found.nodes[rank]], found.num_leaves)[1] for host in hosts]
    return computing + node_cost * max(map(len, sent))


def leaves_of(nodes: Iterable[Node], num_leaves: int) -> list[int]:
    return sorted(one for node in nodes for one in leaves(node, num_leaves))


@given(paces_of, st.integers(1, 12))
def test_a_balanced_plan_is_within_one_percent_of_the_shortest(paces: tuple[int, ...], num_leaves: int) -> None:
    found = balanced(paces, num_leaves)
    assert leaves_of([node for nodes in found.nodes for node in nodes], num_leaves) == [*range(num_leaves)]
    counts = (c for c in itertools.product(range(num_leaves + 1), repeat=len(paces)) if sum(c) == num_leaves)
    best = min(max(n * p for n, p in zip(c, paces, strict=True)) for c in counts)
    length = max(len(own) * pace for own, pace in zip(found.ranges, paces, strict=True))
    assert best <= length <= best * 1.01


@given(paces_of, st.integers(4, 12))
def test_who_shall_show_its_pace_gets_a_micro_batch(paces: tuple[int, ...], num_leaves: int) -> None:
    found = balanced(paces, num_leaves, frozenset(range(len(paces))))
    assert all(len(own) >= 1 for own in found.ranges)


@given(teams(), st.integers(1, 20), st.sampled_from([1, 2, 4, 8]))
def test_with_a_grain_hosts_meet_at_multiples_of_it(
    team: tuple[tuple[int, ...], tuple[range, ...]], num_leaves: int, grain: int
) -> None:
    """And such a plan cannot be shorter by more than one percent."""
    paces, hosts = team
    found = balanced(paces, num_leaves, hosts=hosts, grain=grain)
    assert leaves_of([node for nodes in found.nodes for node in nodes], num_leaves) == [*range(num_leaves)]
    allowed = {*range(0, num_leaves, grain), num_leaves}
    counts = (sum(len(found.ranges[rank]) for rank in host) for host in hosts)
    assert set(itertools.accumulate(counts)) <= allowed

    def length(host: range, count: int) -> int:
        return next(limit for limit in itertools.count() if sum(limit // paces[rank] for rank in host) >= count)

    best = min(
        max(length(host, b - a) for host, (a, b) in zip(hosts, itertools.pairwise((0, *cut, num_leaves)), strict=True))
        for cut in itertools.combinations_with_replacement(sorted(allowed), len(hosts) - 1)
    )
    assert best <= time_of(found, paces, hosts, 0) <= best * 1.01


@given(teams(), st.integers(1, 40), st.integers(0, 40))
def test_no_grain_is_better_than_the_one_that_is_taken(
    team: tuple[tuple[int, ...], tuple[range, ...]], num_leaves: int, node_cost: int
) -> None:
    """Though not all are looked at."""
    paces, hosts = team
    found = weighed(paces, num_leaves, hosts=hosts, node_cost=node_cost)
    assert leaves_of([node for nodes in found.nodes for node in nodes], num_leaves) == [*range(num_leaves)]
    least = time_of(found, paces, hosts, node_cost)
    for level in range(8):
        other = balanced(paces, num_leaves, hosts=hosts, grain=1 << level)
        assert least <= time_of(other, paces, hosts, node_cost)


@given(paces_of, st.integers(1, 40), st.integers(0, 40))
def test_within_one_host_nodes_are_not_weighed(paces: tuple[int, ...], num_leaves: int, node_cost: int) -> None:
    one_host = (range(len(paces)),)
    found = weighed(paces, num_leaves, hosts=one_host, node_cost=node_cost)
    assert found.ranges == balanced(paces, num_leaves).ranges


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


def test_a_short_last_batch_may_have_fewer_leaves_than_members_rest() -> None:
    balance = Balance(4)
    observe(balance, [1.0, 40.0, 40.0, 40.0], 8, WARM_UP + WINDOW + REST)
    rests = [observe(balance, [1.0, 40.0, 40.0, 40.0], 8) for _ in range(REST + 2)]
    assert [8, 0, 0, 0] in rests
    for _ in range(2 * REST):
        assert sum(observe(balance, [1.0, 40.0, 40.0, 40.0], 8)) == 8
        assert sum(observe(balance, [1.0, 40.0, 40.0, 40.0], 2)) == 2


def exchange(balance: Balance, node_seconds: float, num_leaves: int, hosts: Sequence[range], steps: int) -> list[int]:
    """Let equal members make steps over a network; returns how many leaves each had in the last."""
    found, last_seconds = plan(hosts[-1].stop, num_leaves), 0.0
    for _ in range(steps):
        found = balance.decide(num_leaves)
        balance.observe([len(own) for own in found.ranges], [float(len(own)) for own in found.ranges])
        balance.observe_exchange(last_seconds, found.nodes, num_leaves)
        # As it is measured: the sums that come back weigh as much as one node.
        last_seconds = time_of(found, [0.0] * hosts[-1].stop, hosts, node_seconds) + node_seconds
    return [len(own) for own in found.ranges]


def test_over_a_slow_network_fewer_nodes_travel_and_over_a_fast_one_the_shares_fit_the_paces() -> None:
    balance, hosts = Balance(3, [0, 1, 2]), [range(1), range(1, 2), range(2, 3)]
    assert sorted(exchange(balance, 0.1, 32, hosts, 12)) == [10, 11, 11]
    assert sorted(exchange(balance, 1.5, 32, hosts, 12)) == [8, 12, 12]
    assert balance.node_seconds() == 1.5
    assert sorted(exchange(balance, 40.0, 32, hosts, 12)) == [0, 16, 16]
    assert sorted(exchange(balance, 0.1, 32, hosts, 2 * REST)) == [10, 11, 11]


def test_only_where_hosts_meet_the_network_counts() -> None:
    """The members of a host add up what they have before it is sent."""
    balance, hosts = Balance(4, [0, 0, 2, 2]), [range(2), range(2, 4)]
    counts = exchange(balance, 40.0, 20, hosts, 12)
    assert [counts[0] + counts[1], counts[2] + counts[3]] == [16, 4]
    assert exchange(Balance(4), 40.0, 20, [range(4)], 12) == [5, 5, 5, 5]


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
        "w3 takes 2.1x as long as the others for a micro-batch: it now gets 2 of 12",
        "w3 is as fast as the others again: it now gets 4 of 12",
    ]


def test_a_change_without_a_slow_member_says_the_shares() -> None:
    change = ShareChange((5, 4, 3), (0.9, 1.0, 1.15), frozenset())
    assert change.say(["w0", "w1", "w2"]) == "the 12 micro-batches follow the workers' paces: w0 5, w1 4, w2 3"
    change = ShareChange((4, 4, 4), (0.9, 1.0, 1.15), frozenset(), for_network=True)
    assert (
        change.say(["w0", "w1", "w2"])
        == "the 12 micro-batches follow the workers' speeds and the network: w0 4, w1 4, w2 4"
    )
    change = ShareChange((0, 4), (1.0, 1.0), frozenset({0}), for_network=True)
    assert change.say(["w0", "w1"]) == (
        "w0 is as fast as the others again: it now gets 0 of 4; shares that match the speeds better would take longer "
        "to send"
    )


def change_to(*counts: int, slowness: tuple[float, ...] = (1.0, 1.0, 1.0)) -> ShareChange:
    return ShareChange(counts, slowness, frozenset())


def test_a_small_change_is_not_told_and_a_large_one_seldom() -> None:
    told = ToldShares((4, 4, 4))
    assert not told.is_due(change_to(3, 4, 5), 100.0)
    assert told.is_due(change_to(2, 5, 5), 0.0)
    told = told.tell(change_to(2, 5, 5), 0.0)
    assert not told.is_due(change_to(6, 3, 3), SELDOM_S / 2)
    assert told.is_due(change_to(6, 3, 3), SELDOM_S)


def test_a_member_that_becomes_slow_is_told_at_once_and_not_again_and_again() -> None:
    told = ToldShares((4, 4, 4)).tell(change_to(2, 5, 5), 0.0)
    slow = change_to(1, 5, 6, slowness=(2.0, 0.9, 0.9))
    assert told.is_due(slow, 1.0)
    told = told.tell(slow, 1.0)
    assert not told.is_due(change_to(4, 4, 4), 3.0)  # it is as fast as the others again
    assert not told.is_due(slow, 5.0)
    other = change_to(4, 1, 7, slowness=(0.9, 2.0, 0.9))
    assert told.is_due(other, 5.0)
    assert told.is_due(change_to(4, 4, 4), 1.0 + SELDOM_S)


def test_shares_that_go_up_and_down_are_told_twice_in_a_minute() -> None:
    """Two workers on cores that others use as well: one is slower, then the other."""
    balance, told = Balance(2), 0
    for second in range(60):
        observe(balance, [1.0, 1.6] if second // 3 % 2 else [1.6, 1.0], 12)
        told += balance.change is not None
    assert balance._computed_s > 60
    assert 1 <= told <= 2 * balance._computed_s / SELDOM_S


def test_a_change_that_was_not_told_is_told_later_if_it_lasts() -> None:
    balance, said = Balance(2), []
    for paces, number in (([1.0, 2.0], 5), ([1.0, 1.0], 40)):
        for _ in range(number):
            observe(balance, paces, 12)
            if balance.change is not None:
                said.append(balance.change.say(["w0", "w1"]))
    assert said == [
        "w1 takes 2.0x as long as the others for a micro-batch: it now gets 4 of 12",
        "w1 is as fast as the others again: it now gets 6 of 12",
    ]


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
    assert leaves_of(outermost(held), num_leaves) == [*range(num_leaves)]
