"""The state layout: who holds which part, and what follows for losses, newcomers and checkpoints."""

from __future__ import annotations

import pytest

from unisono.core.layout import EVERYTHING, StateLayout, replicated

SHARDED = StateLayout({"first": ("w0", "w1"), "second": ("w1", "w2"), "third": ("w2", "w0")})


def test_one_survivor_holds_a_replicated_state() -> None:
    layout = replicated(["w0", "w1", "w2"])
    assert layout.survives(["w2"])
    assert not layout.survives([])
    assert layout.parts_of("w1") == [EVERYTHING]
    assert layout.alike() == [("w0", "w1", "w2")]


def test_a_state_with_two_copies_of_each_part_survives_one_loss_and_not_two() -> None:
    assert all(SHARDED.survives({"w0", "w1", "w2"} - {lost}) for lost in ("w0", "w1", "w2"))
    assert SHARDED.lost({"w0"}) == ["second"]
    assert not SHARDED.survives({"w0"})
    assert SHARDED.parts_of("w0") == ["first", "third"]


def test_the_first_holder_that_is_able_gives_a_part() -> None:
    assert SHARDED.source("first", {"w0", "w1"}) == "w0"
    assert SHARDED.source("first", {"w1", "w2"}) == "w1"
    assert SHARDED.source("first", {"w2"}) is None


@pytest.mark.parametrize(
    ("worker_ids", "able", "publisher"),
    [
        (["w0", "w1", "w2"], {"w0", "w1", "w2"}, "w0"),
        (["w5", "w1", "w2"], {"w0", "w1", "w2"}, "w1"),
        (["w5", "w6"], {"w0", "w1"}, None),
        (["w5", "w6"], set(), None),
    ],
)
def test_the_first_that_sees_the_directory_writes_for_all(
    worker_ids: list[str], able: set[str], publisher: str | None
) -> None:
    """Known by the workers' names: ranks are those of another generation after a loss."""
    assert replicated(worker_ids).publisher(able) == publisher


def test_all_holders_that_see_the_directory_share_the_writing_of_a_part() -> None:
    assert replicated(["w2", "w0", "w1"]).writers(EVERYTHING, {"w0", "w2"}) == ("w2", "w0")
    assert SHARDED.writers("second", {"w0", "w2"}) == ("w2",)
    assert SHARDED.writers("second", {"w0"}) == ()
    assert SHARDED.publisher({"w2"}) == "w2"


def test_workers_that_hold_the_same_parts_are_alike() -> None:
    layout = StateLayout({"models": ("w0", "w1", "w2", "w3"), "first": ("w0", "w2"), "second": ("w1", "w3")})
    assert layout.alike() == [("w0", "w2"), ("w1", "w3")]
    assert SHARDED.alike() == [("w0",), ("w1",), ("w2",)]
