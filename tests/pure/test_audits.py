"""Audits: who computes what again, who is wrong, and what is to be doubted."""

from __future__ import annotations

import pytest

from unisono.core.audit_rules import (
    IN_DOUBT,
    IN_DOUBT_OF_LASTING,
    TRIED,
    Record,
    advice,
    helpers,
    judge,
    parts,
    too_few,
    tried,
)
from unisono.core.groups import expand
from unisono.core.plan import Plan, plan
from unisono.core.rehearsals import digest_of, key_of, odd_ones
from unisono.core.spec import MOST_AUDITED


def audited(size: int, num_leaves: int, share: float, step: int, hosts: int = 1) -> list[tuple[int, ...]]:
    where = [f"h{rank * hosts // size}" for rank in range(size)]
    found = parts(plan(size, num_leaves), where, [0] * size, share=share, seed=7, step=step)
    assert sorted(leaf for one in found for leaf in one.own) == sorted(leaf for one in found for leaf in one.other)
    return [one.own for one in found]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, MOST_AUDITED])
def test_the_share_of_the_work_is_the_one_that_was_asked_for(size: int, share: float) -> None:
    num_leaves, num_steps = 64, 4000
    number = sum(len(own) for step in range(num_steps) for own in audited(size, num_leaves, share, step))
    assert number / (num_leaves * num_steps) == pytest.approx(share, rel=0.1)


def test_members_with_more_work_make_up_for_those_with_too_little() -> None:
    some = Plan(16, (range(10), range(10, 12), range(12, 16)))
    found = parts(some, [""] * 3, [0] * 3, share=MOST_AUDITED, seed=1, step=1)
    number = sum(len(one.own) for one in found)
    assert number in (6, 8)  # 2 or 3 of each member on average, and 8 can be audited
    assert [len(one.own) for one in found] == ([3, 1, 2] if number == 6 else [5, 1, 2])


@pytest.mark.parametrize("shares", [(1, 15), (2, 6, 8), (1, 1, 14), (3, 6, 7)])
def test_the_share_is_reached_where_some_have_little_to_do(shares: tuple[int, ...]) -> None:
    first = [sum(shares[:rank]) for rank in range(len(shares))]
    uneven = Plan(16, tuple(range(begin, begin + number) for begin, number in zip(first, shares, strict=True)))
    size = len(shares)
    number = sum(
        len(one.own)
        for step in range(2000)
        for one in parts(uneven, [""] * size, [0] * size, share=0.4, seed=7, step=step)
    )
    assert number / (16 * 2000) == pytest.approx(0.4, rel=0.05)


def test_nothing_is_audited_with_share_0_or_alone() -> None:
    assert all(own == () for step in range(50) for own in audited(4, 16, 0.0, step))
    assert audited(1, 16, MOST_AUDITED, 3) == [()]


@pytest.mark.parametrize(("size", "num_leaves"), [(2, 8), (3, 8), (4, 12), (5, 5), (8, 100)])
def test_only_what_begins_a_pair_is_audited_and_by_nobody_who_has_computed_it(size: int, num_leaves: int) -> None:
    ranges = plan(size, num_leaves).ranges
    for step in range(200):
        found = parts(plan(size, num_leaves), [""] * size, [0] * size, share=0.4, seed=1, step=step)
        for rank, one in enumerate(found):
            assert set(one.own) <= set(ranges[rank])
            assert not set(one.other) & set(ranges[rank])
            assert all(leaf % 2 == 0 or leaf - 1 not in ranges[rank] for leaf in one.own)


def test_all_who_are_audited_in_a_step_have_equally_much_to_do() -> None:
    for step in range(100):
        assert len({len(own) for own in audited(4, 64, 0.05, step)}) == 1


def test_in_time_everybody_is_helped_by_everybody_else() -> None:
    seen = {(owner, helper) for draw in range(100) for owner, helper in enumerate(helpers(("",) * 5, (0,) * 5, draw))}
    assert seen == {(owner, helper) for owner in range(5) for helper in range(5) if owner != helper}


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b"), ("a", "a", "b", "b", "c", "c")])
def test_the_helper_is_on_another_machine_where_there_are_several(hosts: tuple[str, ...]) -> None:
    for draw in range(20):
        for owner, helper in enumerate(helpers(hosts, (0,) * len(hosts), draw)):
            assert helper is not None
            assert hosts[owner] != hosts[helper]


def test_only_members_of_equal_arithmetic_help_each_other() -> None:
    arithmetics = (1, 2, 1, 3, 2)
    for draw in range(20):
        found = helpers(("",) * 5, arithmetics, draw)
        assert found[3] is None
        assert all(one is None or arithmetics[one] == arithmetics[owner] for owner, one in enumerate(found))


def test_members_without_work_are_not_audited() -> None:
    some = Plan(4, (range(2), (), range(2, 4)))
    found = parts(some, [""] * 3, [0] * 3, share=MOST_AUDITED, seed=1, step=1)
    assert found[1].own == ()
    assert len(found[0].own) == len(found[2].own) == 1


def test_a_group_helps_another_one_and_whoever_is_in_none_does_nothing() -> None:
    """Its ranks are anywhere; the hosts of a group count together."""
    groups = ((0, 3), (1, 5), (2, 4))
    every = expand(plan(3, 8), groups, 7)
    for step in range(50):
        found = parts(every, list("abcabca"), [0] * 7, groups=groups, share=0.4, seed=1, step=step)
        by_group = parts(plan(3, 8), ["a", "b c", "c b"], [0] * 3, share=0.4, seed=1, step=step)
        assert [found[group[0]] for group in groups] == list(by_group)
        assert all(found[rank] == found[group[0]] for group in groups for rank in group)
        assert (found[6].own, found[6].other) == ((), ())
    one = parts(expand(plan(1, 8), ((0, 1),), 2), ["", ""], [0, 0], groups=((0, 1),), share=0.4, seed=1, step=1)
    assert {(each.own, each.other) for each in one} == {((), ())}


def test_groups_help_each_other_where_all_their_parts_are_of_equal_arithmetic() -> None:
    groups = ((0, 1), (2, 3), (4, 5))
    every = expand(plan(3, 8), groups, 6)
    for step in range(50):
        found = parts(every, [""] * 6, [0, 7, 0, 0, 0, 7], groups=groups, share=0.4, seed=1, step=step)
        assert found[2].own == found[2].other == ()
        assert found[0].own == found[4].other


def test_several_micro_batches_are_compared_by_one_number() -> None:
    assert key_of([5]) == 5
    assert key_of([3, 5]) != key_of([3, 7])
    assert 1 << 62 <= key_of([3, 5]) < 1 << 63
    assert digest_of([9]) == 9
    assert digest_of([1, 2]) != digest_of([2, 1])


def test_too_few_members_are_told_what_they_cannot_find_out() -> None:
    assert "one worker cannot audit" in too_few(1)
    assert "not which one" in too_few(2)
    assert too_few(3) == ""


# -- who is wrong ------------------------------------------------------------------------------------

GOOD, BAD, OTHER = 1, 2, 3


@pytest.mark.parametrize(
    ("first", "again", "wrong", "is_lasting"),
    [
        ({"w0": BAD, "w1": GOOD}, {"w0": GOOD, "w1": GOOD, "w2": GOOD}, ("w0",), False),
        ({"w0": GOOD, "w1": BAD}, {"w0": GOOD, "w1": GOOD, "w2": GOOD}, ("w1",), False),
        ({"w0": BAD, "w1": GOOD}, {"w0": BAD, "w1": GOOD, "w2": GOOD}, ("w0",), True),
        ({"w0": BAD, "w1": GOOD}, {"w0": OTHER, "w1": GOOD, "w2": GOOD}, ("w0",), True),
        ({"w0": BAD, "w1": GOOD}, {"w1": GOOD, "w2": GOOD, "w3": GOOD}, ("w0",), False),  # it is lost meanwhile
        ({"w0": BAD, "w1": GOOD}, {"w1": GOOD, "w2": GOOD}, ("w0",), False),
    ],
)
def test_a_third_decides(
    first: dict[str, int], again: dict[str, int], wrong: tuple[str, ...], is_lasting: bool
) -> None:
    found = judge(first, again)
    assert (found.kind, found.wrong) == ("convicted", wrong)
    assert found.is_lasting == is_lasting


def test_a_fault_that_comes_and_goes_is_told_from_one_that_is_always_there() -> None:
    """By more micro-batches than the one that differs: that one may be wrong each time by chance, or by its values."""
    first, again = {"w0": BAD, "w1": GOOD}, {"w0": BAD, "w1": GOOD, "w2": GOOD}
    assert judge(first, again, [again] * 7).is_lasting
    assert not judge(first, again, [again] * 6 + [{"w0": GOOD, "w1": GOOD, "w2": GOOD}]).is_lasting
    assert judge(first, {"w0": BAD, "w1": GOOD}, [{"w0": OTHER, "w1": GOOD}]).is_lasting
    assert not judge(first, {"w0": BAD, "w1": GOOD}, [{"w0": GOOD, "w1": GOOD}]).is_lasting


@pytest.mark.parametrize("num_leaves", [1, 3, 8, 100])
def test_the_disputed_micro_batch_and_others_are_tried(num_leaves: int) -> None:
    for disputed in (0, num_leaves - 1):
        found = tried(disputed, num_leaves)
        assert (len(found), found[0]) == (TRIED, disputed)
        assert len(set(found)) == min(num_leaves, TRIED)


def test_two_cannot_tell_who_is_wrong() -> None:
    assert judge({"w0": BAD, "w1": GOOD}, {"w0": BAD, "w1": GOOD}).kind == "two"
    assert judge({"w0": BAD, "w1": GOOD}, {"w0": BAD, "w1": GOOD}).wrong == ()
    assert judge({"w0": BAD, "w1": GOOD}, {"w0": GOOD, "w1": GOOD}).wrong == ("w0",)  # a hint, and no verdict
    assert judge({"w0": BAD, "w1": GOOD}, {"w1": GOOD}).kind == "two"  # w0 is lost, and w1 may be wrong each time


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"w0": 1, "w1": 2}, {"w0": 1, "w1": 2, "w2": 3}),
        ({"w0": 1, "w1": 2}, {"w0": 3, "w1": 3, "w2": 3}),
        ({"w0": 1, "w1": 2}, {"w0": 1, "w1": 1, "w2": 2, "w3": 2}),
        ({"w0": 1, "w1": 2}, {"w0": 4, "w1": 5, "w2": 6, "w3": 7, "w4": 7}),
    ],
)
def test_nobody_is_convicted_for_what_is_not_deterministic(first: dict[str, int], again: dict[str, int]) -> None:
    assert judge(first, again).kind == "many"


def test_a_minority_of_states_is_wrong() -> None:
    alike = dict.fromkeys(("w0", "w1", "w2", "w3", "w4"), 0)
    assert odd_ones({"w0": 1, "w1": 1, "w2": 2}, alike) == ("w2",)
    assert odd_ones({"w0": 1, "w1": 1, "w2": 2, "w3": 3, "w4": 1}, alike) == ("w2", "w3")
    for nobody in ({"w0": 1, "w1": 2}, {"w0": 1, "w1": 2, "w2": 3}, {"w0": 1, "w1": 1, "w2": 2, "w3": 2}):
        assert odd_ones(nobody, alike) == ()
    assert odd_ones({"w0": 1, "w1": 1, "w2": 2}, alike | {"w2": 7}) == ()  # of another arithmetic


# -- what is to be doubted ---------------------------------------------------------------------------


def audited_in(steps: range, worker: str = "w1", **fields: int) -> Record:
    record = Record(**fields)
    for step in steps:
        record.right(step, [worker])
        record.same(step)
    return record


def test_the_step_of_an_audit_that_was_passed_is_to_be_doubted_too() -> None:
    """Only one micro-batch of it was looked at, or a few."""
    record = audited_in(range(200))
    assert IN_DOUBT_OF_LASTING == 3
    assert record.doubtful_from(["w1"], is_lasting=True) == 197
    assert record.doubtful_from(["w1", "w2"], is_lasting=True) == 0
    record.right(300, ["w1"], number=3)
    assert record.doubtful_from(["w1"], is_lasting=True) == 300


def test_a_fault_that_comes_and_goes_puts_many_audits_in_doubt() -> None:
    """One that spoils every 20th micro-batch would have passed them with a probability below 1%."""
    assert (1 - 1 / 20) ** IN_DOUBT < 0.01
    assert audited_in(range(200)).doubtful_from(["w1"]) == 200 - IN_DOUBT
    assert audited_in(range(IN_DOUBT - 1)).doubtful_from(["w1"]) == 0


@pytest.mark.parametrize("wrong", [0.01, 0.05, 0.2, 0.5, 8 / 11, 0.9, 0.99])
def test_a_fault_is_hardly_ever_taken_for_one_that_began_later(wrong: float) -> None:
    """It would be wrong in all that is tried, and have been right in all audits that are put in doubt before."""
    assert wrong**TRIED * (1 - wrong) ** IN_DOUBT_OF_LASTING < 0.0017


def test_a_newcomer_learns_from_the_others_what_they_know() -> None:
    record = audited_in(range(5))
    record.learn({"w1": [3], "w2": [9] * IN_DOUBT}, 2, 7)
    assert record.passed == {"w1": [0, 1, 2, 3, 4], "w2": [9] * IN_DOUBT}
    assert (record.doubtful_from(["w2"]), record.doubtful_from(["w7"]), record.alike) == (9, 2, 7)


def test_nobody_is_to_be_doubted_from_before_he_came() -> None:
    record = Record(begins=100)
    record.seen(100, {"w0": "a", "w1": "b"})
    record.seen(120, {"w0": "a", "w1": "b", "w2": "a"})
    assert (record.doubtful_from(["w1"]), record.doubtful_from(["w2"])) == (100, 120)


def test_who_replaces_a_worker_is_to_be_doubted_from_when_that_one_was() -> None:
    """It may be the same processor, GPU or memory."""
    record = Record()
    record.seen(0, {"w0": "a", "w1": "b"})
    for step in range(200):
        record.right(step, ["w0"])
    record.right(50, ["w1"])
    record.seen(200, {"w0": "a", "w2": "b"})
    record.seen(210, {"w3": "a", "w2": "b"})
    assert (record.doubtful_from(["w2"]), record.doubtful_from(["w3"])) == (0, 100)


def test_a_member_whose_sum_came_from_others_is_not_new_in_the_next_step() -> None:
    record = Record()
    for hosts in ({"w0": "a", "w1": "b"}, {"w0": "a"}, {"w0": "a", "w1": "b"}):
        record.seen(120, hosts)
    assert record.doubtful_from(["w1"]) == 0


def test_a_newcomer_knows_nothing_of_those_who_were_there_before() -> None:
    record = Record()
    record.seen(120, {"w0": "", "w1": "", "w2": ""})
    assert record.passed == {}


def test_a_checkpoint_is_sound_that_was_complete_a_step_before_what_is_to_be_doubted() -> None:
    """A state that is wrong shows in the gradients of a later step: that of an optimizer one update later."""
    record = audited_in(range(200), begins=4)
    assert (record.sound(["w0"]), record.sound(["w1"]), record.sound(["w1"], is_lasting=True)) == (4, 99, 196)


def test_a_state_that_few_gradients_depend_on_is_sound_where_the_members_were_compared() -> None:
    record = audited_in(range(200))
    record.same(50)
    assert (record.sound(["w1"]), record.sound(["w1"], is_lasting=True), record.alike) == (50, 196, 50)


def test_with_a_delay_a_checkpoint_holds_so_many_gradients_more() -> None:
    record = audited_in(range(15), lag=3)
    assert record.sound(["w1"], is_lasting=True) == 12 - 1 - 3
    assert record.compared == 11


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_sound() -> None:
    assert advice([15, 5, 10], 12) == (10, True)
    assert advice([15, 5, 10], 10) == (10, True)
    assert advice([15, 10], 9) == (10, False)
