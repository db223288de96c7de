"""When workers compare, and who computes what twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.divergence import Facts, causes, parting_words
from unisono.core.plan import Plan, plan
from unisono.core.rehearsals import (
    Odd,
    Twice,
    balance_of_copies,
    is_compared,
    is_rehearsed,
    minority,
    odd_newcomers,
    on_trial,
    rehearsal,
    without,
)
from unisono.core.telemetry import Compared


def test_checks_are_dense_at_the_beginning_and_rare_afterwards() -> None:
    assert [step for step in range(1100) if is_rehearsed(step)] == [
        0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1000, 1024,
    ]  # fmt: skip
    assert [step for step in range(330) if is_compared(step)] == [
        0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 100, 128, 200, 256, 300,
    ]  # fmt: skip


def test_the_last_step_and_the_first_with_other_members_are_checked() -> None:
    assert is_compared(777, is_last=True)
    assert is_rehearsed(777, is_last=True)
    assert is_rehearsed(777, is_first_of_generation=True)


@given(num_members=st.integers(2, 9), num_leaves=st.integers(1, 20), turn=st.integers(0, 20))
def test_members_compute_a_micro_batch_of_another(num_members: int, num_leaves: int, turn: int) -> None:
    chosen = plan(num_members, num_leaves)
    parts = [rehearsal(chosen, rank, turn) for rank in range(num_members)]
    firsts = [tuple(leaves[:1]) for leaves in chosen.ranges]
    assert [part.own for part in parts] == firsts
    for rank, part in enumerate(parts):
        others = [first for peer, first in enumerate(firsts) if peer != rank and first]
        assert part.other in others or part.other == ()
        is_left_out = turn % 4 == 1 and rank == turn // 4 % num_members
        assert (part.other == ()) == (is_left_out or not others)


def test_one_member_is_left_out_of_the_second_step() -> None:
    """Else all would have computed as many micro-batches, and what they count would be equal, and wrong."""
    chosen = plan(3, 6)
    for turn in (0, 2, 3, 4, 8, 1000):
        assert [rehearsal(chosen, rank, turn).other for rank in range(3)] == [(2,), (4,), (0,)]
    assert [rehearsal(chosen, rank, 1).other for rank in range(3)] == [(), (4,), (0,)]
    assert [rehearsal(chosen, rank, 5).other for rank in range(3)] == [(2,), (), (0,)]


def test_a_member_without_micro_batches_computes_one_of_the_next() -> None:
    chosen = Plan(2, (range(1), range(1, 2), range(2, 2)))
    assert rehearsal(chosen, 2, 0).own == ()
    assert rehearsal(chosen, 2, 0).other == (0,)
    assert rehearsal(chosen, 1, 0).other == (0,)


def test_a_newcomer_rehearses_in_each_step_of_its_trial() -> None:
    chosen = without(plan(3, 6), {2})
    assert chosen.ranges == (range(3), range(3, 6), ())
    assert [rehearsal(chosen, 2, turn, {2}) for turn in range(10)] == [Twice((), (0,))] * 10
    assert rehearsal(without(plan(2, 1), {1}), 1, 1, {1}) == Twice((), (0,))
    assert rehearsal(without(plan(2, 1), {1}), 0, 0, {1}) == Twice((0,), ())


@pytest.mark.parametrize(
    ("joined", "step", "lag", "ranks"),
    [
        ([-1, -1], 0, 0, set()),
        ([-1, 40], 40, 0, {1}),
        ([-1, 40], 41, 0, {1}),
        ([-1, 40], 42, 0, set()),
        ([-1, 40], 43, 1, {1}),
        ([-1, 40], 44, 1, set()),
        ([30, 40, -1], 41, 0, {1}),
        ([40, 40], 40, 0, set()),  # there is nobody else
        ([-1, 0, 0], 1, 0, {1, 2}),
    ],
)
def test_nothing_of_a_newcomer_is_summed_in_its_first_steps(
    joined: list[int], step: int, lag: int, ranks: set[int]
) -> None:
    assert on_trial(joined, step, lag=lag) == ranks


def says(
    state: int = 1, *, own: int = 7, other: int = 7, arithmetic: int = 0, leaf: int = 0, step: int = 40
) -> Compared:
    """What a member says that has computed micro-batch ``leaf``, and the one after it for another member."""
    return Compared(
        compared_step=step,
        state_digest=state,
        own_leaf=leaf,
        own_digest=own,
        other_leaf=leaf + 1,
        other_digest=other,
        arithmetic=arithmetic,
    )


def helps(digest: int, *, leaf: int = 0, state: int = 1, arithmetic: int = 0) -> Compared:
    """What a newcomer says that has computed a micro-batch of a member."""
    return Compared(compared_step=40, state_digest=state, other_leaf=leaf, other_digest=digest, arithmetic=arithmetic)


NEW = {"w0": -1, "w1": -1, "w2": 40}


@pytest.mark.parametrize(
    ("said", "joined", "found"),
    [
        ([says(), says(leaf=1), helps(7)], NEW, {}),
        ([says(), says(leaf=1), helps(7, arithmetic=5)], NEW, {}),
        ([says(), says(leaf=1), helps(8)], NEW, {"w2": Odd("w0", 0)}),
        ([says(), says(leaf=1), helps(8, arithmetic=5)], NEW, {"w2": Odd("w0", 0)}),
        ([says(), says(leaf=1), helps(7, state=2)], NEW, {"w2": Odd("w0")}),
        ([says(), says(leaf=1), says(state=2, leaf=2, step=-1)], NEW, {}),  # it has not compared its state
        ([says(), says(leaf=1), helps(8)], {"w2": 3}, {}),  # no newcomer any more: all are left to `minority`
        ([says(), says(leaf=1), helps(8, arithmetic=5)], {"w2": 3}, {"w2": Odd("w0", 0)}),
        ([says(other=9), says(leaf=1, arithmetic=5)], {"w1": 3}, {"w1": Odd("w0", 1)}),
        ([says(other=9, arithmetic=5), says(leaf=1)], {"w0": 3, "w1": 7}, {"w1": Odd("w0", 1)}),
        ([says(), says(leaf=1, other=9), says(leaf=2)], {}, {}),
        ([helps(8), says()], {"w0": 40, "w1": 40}, {}),  # both are new
    ],
)
def test_of_members_that_differ_the_newcomers_are_odd(
    said: list[Compared], joined: dict[str, int], found: dict[str, Odd]
) -> None:
    assert odd_newcomers(dict(zip(("w0", "w1", "w2"), said, strict=False)), joined, 40) == found


@pytest.mark.parametrize(
    ("facts", "first", "words"),
    [
        (Facts(), "`unisono check SCRIPT` names the line. Look for anything that", "a counter"),
        (Facts(is_of_state=True), "`unisono check SCRIPT` names the line. Something between the steps", "run.rank"),
        (Facts(are_batches_equal=False), "The batches differ already", "run.broadcast them"),
        (Facts(are_batches_equal=False, compiled="torch.compile"), "The batches differ already", "unisono check"),
        (Facts(compiled="torch.compile"), "The script uses torch.compile", "torch.compile(model, dynamic=True)"),
        (Facts(compiled="TorchScript"), "The model has a part in TorchScript", "names the line"),
        (Facts(are_batches_equal=True, is_loss_equal=True), "The batch and the loss are the same", "hooks on"),
        (Facts(are_batches_equal=True), "`unisono check SCRIPT` names the line. Look for", "the clock"),
        (Facts(is_arithmetic_equal=False, joined=3, newer="w3"), "Their processors or libraries differ", "avx2"),
        (Facts(joined=41, newer="w3"), "w3 joined at step 41: it has not done the steps", "names the line"),
        (Facts(joined=41, newer="w3", num_skipped=1), "w3 joined at step 41: it has skipped 1 call of", "broadcast"),
        (Facts(joined=41, newer="w3", num_skipped=2), "w3 joined at step 41: it has skipped 2 calls of", "rollout"),
    ],
)
def test_the_advice_is_that_of_what_is_known(facts: Facts, first: str, words: str) -> None:
    assert causes(facts).startswith(first)
    assert words in causes(facts)
    assert not causes(facts).endswith((".", " "))


def test_one_that_is_sent_away_is_told_whether_it_has_counted() -> None:
    facts = Facts(joined=41, newer="w3")
    assert "Nothing that it has computed was summed" in parting_words("w3", "x", facts, has_counted=False)
    words = parting_words("w3", "x", facts, has_counted=True)
    assert "have counted since step 41" in words
    assert "at most 41 steps" in words


def test_one_member_computes_its_own_first_micro_batch_again_in_the_first_steps() -> None:
    assert rehearsal(plan(1, 8), 0, 1) == Twice(own=(0,), other=(0,))
    assert [step for step in range(1100) if is_rehearsed(step, alone=True)] == [0, 1]


@pytest.mark.parametrize(
    ("values", "odd"),
    [("", []), ("aaa", []), ("ab", [1]), ("abb", [0]), ("aab", [2]), ("abab", [1, 3]), ("abc", [1, 2])],
)
def test_the_minority_is_who_has_not_the_most_frequent_value(values: str, odd: list[int]) -> None:
    assert minority(list(values)) == odd


@given(
    holders=st.lists(st.lists(st.sampled_from("abcde"), min_size=1, unique=True), min_size=1, max_size=8),
    data=st.data(),
)
def test_one_number_tells_whether_all_copies_are_equal(holders: list[list[str]], data: st.DataObject) -> None:
    digests = {number: data.draw(st.integers(0, 2**64 - 1)) for number in range(len(holders))}
    held = {worker: {n: d for n, d in digests.items() if worker in holders[n]} for worker in "abcde"}

    def total() -> int:
        return sum(balance_of_copies(held[worker], holders, worker) for worker in held) % 2**64

    assert total() == 0
    number = data.draw(st.sampled_from(range(len(holders))))
    if len(holders[number]) > 1:
        held[data.draw(st.sampled_from(holders[number]))][number] ^= 0x1234567
        assert total() != 0
