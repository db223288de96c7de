"""When a checkpoint is begun, published, dropped and kept: the same on all members, whatever happens in between."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.decisions.cadence import (
    Checkpoints,
    Status,
    Verdict,
    Word,
    assign_parts,
    choose_kept,
    choose_writer,
    differences,
    is_due,
    judge,
    may_begin,
    table,
)
from unisono.errors import UsageError

IDLE = Word(reaches=1.0)


def at(step: int, status: Status) -> Word:
    return Word(0.0, float(step), status, 1.0)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([IDLE, IDLE], Verdict.NOTHING),
        ([at(4, Status.BUSY), at(4, Status.WRITTEN)], Verdict.WAIT),
        ([at(4, Status.WRITTEN), at(4, Status.WRITTEN)], Verdict.COMMIT),
        ([at(4, Status.WRITTEN), at(4, Status.FAILED)], Verdict.FAIL),
        ([at(4, Status.BUSY), at(4, Status.FAILED)], Verdict.FAIL),
        ([at(4, Status.WRITTEN), IDLE], Verdict.DROP),
        ([at(4, Status.WRITTEN), at(5, Status.WRITTEN)], Verdict.DROP),
    ],
)
def test_what_becomes_of_an_attempt(words: list[Word], verdict: Verdict) -> None:
    for order in itertools.permutations(words):
        assert judge(order) is verdict


def test_nobody_begins_while_one_is_busy_or_none_can_write() -> None:
    assert may_begin([IDLE, Word()])
    assert not may_begin([IDLE, Word(0.0, -1.0, Status.BUSY, 1.0)])  # it publishes the one before
    assert not may_begin([IDLE, at(4, Status.WRITTEN)])
    assert not may_begin([Word(), Word()])


def test_what_makes_one_due() -> None:
    policy = Checkpoints(every_steps=5)
    assert [step for step in range(1, 12) if is_due(policy, step, [IDLE, IDLE])] == [5, 10]
    assert is_due(policy, 7, [IDLE, IDLE._replace(wants=1.0)])
    assert is_due(None, 7, [IDLE._replace(wants=1.0)])
    assert not is_due(None, 5, [IDLE])
    assert not is_due(Checkpoints(every_seconds=1.0), 5, [IDLE])


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_parts_are_about_as_large_as_each_other(sizes: list[int], num_parts: int) -> None:
    parts = assign_parts(sizes, num_parts)
    assert parts == assign_parts(sizes, num_parts)
    loads = [sum(size for size, part in zip(sizes, parts, strict=True) if part == p) for p in range(num_parts)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_newest_the_best_and_every_nth_are_kept() -> None:
    draw = random.Random(3)
    saved = {step: {"loss": draw.random()} for step in range(10, 210, 10)}
    saved[60]["loss"] = -1.0
    saved[70]["loss"] = 2.0
    assert choose_kept(saved, Checkpoints(keep=2), published=200) == {190, 200}
    assert choose_kept(saved, Checkpoints(keep=1, keep_best="loss"), published=200) == {60, 200}
    assert choose_kept(saved, Checkpoints(keep=1, keep_best="loss", best="max"), published=200) == {70, 200}
    assert choose_kept(saved, Checkpoints(keep=1, keep_every=100), published=200) == {100, 200}
    assert choose_kept(saved, Checkpoints(keep=1, keep_best="nobody has logged it"), published=200) == {200}


def test_what_was_just_written_is_kept() -> None:
    """Whatever else is there: the only one that a run goes on from."""
    saved: dict[int, dict[str, float]] = {3: {}, 5: {}, 6: {}, 9: {}}
    assert choose_kept(saved, Checkpoints(keep=2), published=5) == {5, 6, 9}


def test_of_equal_metrics_the_oldest_is_the_best() -> None:
    """Otherwise a metric that stands still would remove the checkpoint that reached it first."""
    saved = {1: {"a": 5.0}, 2: {"a": 5.0}, 3: {}}
    assert choose_kept(saved, Checkpoints(keep=1, keep_best="a", best="max"), published=3) == {1, 3}


def test_recipes_are_compared_name_by_name() -> None:
    saved = {"seed": 3, "microbatches": 8, "parameters": {"a": "float32 [2]", "b": "float32 [3]"}}
    assert differences(saved, saved) == []
    now = {"seed": 3, "microbatches": 4, "parameters": {"a": "float32 [5]", "c": "float32 [1]"}}
    assert differences(saved, now) == [
        ("microbatches", "8", "4"),
        ("parameters: a", "float32 [2]", "float32 [5]"),
        ("parameters: b", "float32 [3]", "-"),
        ("parameters: c", "-", "float32 [1]"),
    ]


def test_a_table_of_differences_ends_somewhere() -> None:
    text = table([(f"parameters: {n}", "1", "2") for n in range(40)], most=3)
    assert text.splitlines()[0].split() == ["checkpoint", "script"]
    assert text.splitlines()[-1] == "  and 37 more"
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every_steps": 0}, "every_steps=...) must be above 0"),
        ({"every_seconds": -1.0}, "every_seconds=...) must be above 0"),
        ({"keep": 0}, "keep=...) must be at least 1, got 0"),
        ({"best": "most"}, "'min' or 'max', got 'most'"),
        ({"on_signal": 300}, "from 0 to 255, or None; got 300"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Checkpoints(**given)  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("worker_ids", "reaching", "rank"),
    [
        (["w0", "w1"], None, 0),
        (["w0", "w1", "w2"], {"w0", "w1", "w2"}, 0),
        (["w5", "w1", "w2"], {"w0", "w1", "w2"}, 1),
        (["w5", "w6"], {"w0", "w1"}, None),
        (["w5", "w6"], set(), None),
    ],
)
def test_the_first_that_sees_the_directory_writes_for_all(
    worker_ids: list[str], reaching: set[str] | None, rank: int | None
) -> None:
    """Known by the workers' names: ranks are those of another generation after a loss."""
    assert choose_writer(worker_ids, reaching) == rank
