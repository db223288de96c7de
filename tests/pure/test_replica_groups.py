"""Groups of local steps: who computes which replica with whom, and who keeps its state meanwhile."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.holdings import keepers
from unisono.core.plan import Plan, plan, replan
from unisono.core.tree import leaf, leaves
from unisono.strategies.local.grouping import Grouping, groups_of


def hosts(*sizes: int) -> list[str]:
    return [f"host{index}" for index, size in enumerate(sizes) for _ in range(size)]


def groups(replicas: int, *sizes: int) -> tuple[tuple[int, ...], ...]:
    where = hosts(*sizes)
    return groups_of(plan(len(where), replicas), where).groups


def test_members_of_one_host_share_the_replicas_equally() -> None:
    assert groups(2, 4) == ((0, 1), (2, 3))
    assert groups(2, 5) == ((0, 1), (2, 3, 4))
    assert groups(1, 3) == ((0, 1, 2),)
    assert groups(3, 5) == ((0,), (1, 2), (3, 4))


def test_a_group_stays_on_one_host_where_there_are_enough_replicas() -> None:
    """Its members exchange gradients in every step, which is what local steps avoid between hosts."""
    assert groups(2, 3, 1) == ((0, 1, 2), (3,))
    assert groups(3, 4, 2) == ((0, 1), (2, 3), (4, 5))
    assert groups(4, 7, 1) == ((0, 1), (2, 3), (4, 5, 6), (7,))


def test_a_group_spans_hosts_where_there_are_more_hosts_than_replicas() -> None:
    assert groups(2, 1, 1, 1, 1) == ((0, 1), (2, 3))
    assert groups(2, 2, 2, 1) == ((0, 1), (2, 3, 4))
    assert groups(1, 2, 2) == ((0, 1, 2, 3),)


def test_as_few_members_as_replicas_work_alone() -> None:
    assert groups(4, 2, 2) == ()
    assert groups(5, 2, 2) == ()
    assert groups_of(plan(2, 3), hosts(2)).replicas(1) in (range(1, 3), range(2, 3))


def test_one_of_a_group_hands_its_replica_in() -> None:
    grouping = groups_of(plan(5, 2), hosts(5))
    assert [list(each) for each in grouping.plan.ranges] == [[0], [], [1], [], []]
    assert [list(grouping.replicas(rank)) for rank in range(5)] == [[0], [0], [1], [1], [1]]


def test_after_a_loss_all_that_are_able_compute_what_is_missing() -> None:
    """Who has finished the round stands by; what others have finished counts."""
    missing = replan([[leaf(0, 3)], [], [], []], [True, True, False, True], 3)
    grouping = groups_of(missing, hosts(2, 2), [True, True, False, True])
    assert grouping.groups == ((0, 1), (3,))
    assert [each for node in grouping.plan.nodes[0] for each in leaves(node, 3)] == [0, 1]
    assert grouping.replicas(2) == ()


def test_a_lost_replica_is_not_computed_across_hosts() -> None:
    """Each replica had a host of its own; the one that is missing gets the host with the most members."""
    missing = replan([[leaf(0, 3)], [leaf(1, 3)], []], [True] * 3, 3)
    assert groups_of(missing, hosts(1, 2), [True] * 3).groups == ((1, 2),)


@st.composite
def rosters(draw: st.DrawFn) -> tuple[list[str], list[bool], int]:
    where = hosts(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)))
    able = draw(st.lists(st.booleans(), min_size=len(where), max_size=len(where)).filter(any))
    return where, able, draw(st.integers(1, 9))


@given(rosters())
def test_every_replica_is_computed_once_and_handed_in_by_one_of_those_who_compute_it(
    roster: tuple[list[str], list[bool], int],
) -> None:
    where, able, replicas = roster
    grouping: Grouping = groups_of(replan([()] * len(where), able, replicas), where, able)
    handed_in = [replica for ranks in grouping.plan.ranges for replica in ranks]
    assert sorted(handed_in) == list(range(replicas))
    covered = [each for nodes in grouping.plan.nodes for node in nodes for each in leaves(node, replicas)]
    assert sorted(covered) == list(range(replicas))
    members = list(itertools.chain.from_iterable(grouping.groups))
    assert len(members) == len(set(members))
    assert all(able[rank] for rank in members)
    for rank in range(len(where)):
        computed = grouping.replicas(rank)
        assert set(grouping.plan.ranges[rank]) <= set(computed)
        assert able[rank] or not computed
    if grouping.groups:
        assert all(list(group) == sorted(group) for group in grouping.groups)
        assert len(grouping.groups) == replicas
        if len(set(where)) <= replicas:
            assert all(len({where[rank] for rank in group}) == 1 for group in grouping.groups)


@given(rosters())
def test_nobody_is_idle_while_there_is_something_to_compute(roster: tuple[list[str], list[bool], int]) -> None:
    where, _, replicas = roster
    grouping = groups_of(plan(len(where), replicas), where)
    if len(where) > replicas:
        assert sorted(itertools.chain.from_iterable(grouping.groups)) == list(range(len(where)))


def test_as_many_members_keep_a_state_as_copies_are_wanted() -> None:
    """The others of a group use theirs up; those that hold it and do not compute it keep it anyway."""
    holders = {0: (0, 1, 2), 1: (0, 3, 4)}
    assert keepers(holders, {0: (0, 1, 2), 1: (3, 4)}, 2) == {0: (0, 1), 1: (3,)}
    assert keepers(holders, {0: (0, 1, 2)}, 1) == {0: (0,)}
    assert keepers({0: (0, 1, 2)}, {0: (0, 1)}, 1) == {0: ()}


def test_a_plan_without_work_has_no_groups() -> None:
    nothing = Plan(2, ((), (), ()), ((leaf(0, 2),), (leaf(1, 2),), ()))
    assert groups_of(nothing, hosts(3)).groups == ()
