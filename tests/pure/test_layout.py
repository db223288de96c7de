"""The state layout: who holds which part, and what follows for losses, newcomers and checkpoints."""

from __future__ import annotations

from unisono.decisions.layout import EVERYTHING, StateLayout, replicated

SHARDED = StateLayout({"first": ("w0", "w1"), "second": ("w1", "w2"), "third": ("w2", "w0")})


def test_one_survivor_holds_a_replicated_state() -> None:
    layout = replicated(["w0", "w1", "w2"])
    assert layout.survives(["w2"])
    assert not layout.survives([])
    assert layout.parts_of("w1") == [EVERYTHING]
    assert layout.copies(EVERYTHING) == ("w0", "w1", "w2")


def test_a_state_with_two_copies_of_each_part_survives_one_loss_and_not_two() -> None:
    assert all(SHARDED.survives({"w0", "w1", "w2"} - {lost}) for lost in ("w0", "w1", "w2"))
    assert SHARDED.lost({"w0"}) == ["second"]
    assert not SHARDED.survives({"w0"})
    assert SHARDED.parts_of("w0") == ["first", "third"]


def test_the_first_holder_that_is_able_gives_a_part() -> None:
    assert SHARDED.source("first", {"w0", "w1"}) == "w0"
    assert SHARDED.source("first", {"w1", "w2"}) == "w1"
    assert SHARDED.source("first", {"w2"}) is None
