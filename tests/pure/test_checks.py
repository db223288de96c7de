"""When workers compare, and who computes what twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.plan import Plan, plan
from unisono.core.rehearsals import Twice, balance_of_copies, is_compared, is_rehearsed, minority, rehearsal


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
