"""When a checkpoint is begun, published, dropped and kept: the same on all members, whatever happens in between."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.cadence import (
    CheckpointReport,
    Checkpoints,
    SnapshotDecision,
    Status,
    assign_parts,
    choose_kept,
    differences,
    is_due,
    judge,
    may_begin,
    table,
)
from unisono.core.errors import UsageError

IDLE = CheckpointReport(step=5, reaches=True)
BUSY, WRITTEN, PUBLISHING, PUBLISHED, FAILED, CHANGED = (
    IDLE._replace(status=status)
    for status in (
        Status.BUSY, Status.WRITTEN, Status.PUBLISHING, Status.PUBLISHED, Status.FAILED, Status.CHANGED,
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("publisher", "other", "verdict"),
    [
        (BUSY, WRITTEN, SnapshotDecision.WAIT),
        (WRITTEN, BUSY, SnapshotDecision.WAIT),
        (WRITTEN, WRITTEN, SnapshotDecision.PUBLISH),
        (PUBLISHING, WRITTEN, SnapshotDecision.WAIT),
        (PUBLISHED, WRITTEN, SnapshotDecision.DONE),
        (IDLE, WRITTEN, SnapshotDecision.DONE),  # there was nothing to write: a checkpoint of this step is there
        (WRITTEN, FAILED, SnapshotDecision.FAIL),
        (FAILED, BUSY, SnapshotDecision.FAIL),
        (CHANGED, BUSY, SnapshotDecision.RETAKE),
        (WRITTEN, CHANGED, SnapshotDecision.RETAKE),
    ],
)
def test_what_becomes_of_a_snapshot(
    publisher: CheckpointReport, other: CheckpointReport, verdict: SnapshotDecision
) -> None:
    assert judge([publisher, other], publisher=0, same_generation=True) is verdict
    assert judge([other, publisher], publisher=1, same_generation=True) is verdict


@pytest.mark.parametrize("reports", [*itertools.product((IDLE, BUSY, WRITTEN, PUBLISHED, FAILED), repeat=2)])
def test_a_snapshot_of_other_members_is_lost_when_nobody_publishes_it(reports: tuple[CheckpointReport, ...]) -> None:
    """Until then its parts stay, of which one would be missing in a checkpoint that has its name."""
    assert judge(reports, publisher=0, same_generation=False) is SnapshotDecision.LOST
    assert judge([*reports, PUBLISHING], publisher=0, same_generation=False) is SnapshotDecision.WAIT


def test_no_snapshot_is_taken_while_one_member_is_busy_or_ahead_or_none_can_write() -> None:
    assert may_begin([IDLE, IDLE._replace(reaches=False)])
    assert may_begin([PUBLISHED, IDLE])
    assert may_begin([CHANGED])
    for other in (BUSY, WRITTEN, PUBLISHING, FAILED):
        assert not may_begin([IDLE, other])
    assert not may_begin([IDLE, IDLE._replace(step=6)])  # it has passed the boundary that the others come to
    assert not may_begin([IDLE._replace(reaches=False)] * 2)


def test_what_makes_one_due() -> None:
    policy = Checkpoints(every_steps=5)
    assert [step for step in range(1, 12) if is_due(policy, step, [IDLE, IDLE])] == [5, 10]
    assert is_due(policy, 7, [IDLE, IDLE._replace(wants=True)])
    assert is_due(None, 7, [IDLE._replace(wants=True)])
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
        ({"exit_code_on_sigterm": 300}, "from 0 to 255, or None; got 300"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Checkpoints(**given)  # type: ignore[arg-type]
    assert said in str(caught.value)
