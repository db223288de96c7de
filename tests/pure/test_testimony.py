"""Who is wrong, by what members say when some have computed different values, and by what all were told before."""

from __future__ import annotations

from unisono.decisions.audits import key_of
from unisono.decisions.layout import replicated
from unisono.rounds import testimony
from unisono.rounds.testimony import Told, first_difference, named, of_lost, told_of
from unisono.telemetry import StepTelemetry

IDS = ("w0", "w1", "w2")
GROUPS = replicated(IDS).alike()
KEY = key_of([3, 7])


def told(**states: int) -> Told:
    """``w0`` has computed the micro-batches 3 and 7, ``w1`` as well with other bits, and ``w2`` none of them."""
    state = {name: {"compared_step": 5, "state_digest": digest} for name, digest in states.items()}
    said = {
        "w0": StepTelemetry(own_leaf=KEY, own_digest=1, **state.get("w0", {})),
        "w1": StepTelemetry(other_leaf=KEY, other_digest=2, **state.get("w1", {})),
        "w2": StepTelemetry(**state.get("w2", {})),
    }
    return told_of(said, GROUPS, {KEY: (3, 7)})


def says(worker: str, leaves: dict[int, int] | None = None, what: Told | None = None) -> testimony.Testimony:
    return testimony.Testimony(worker, 0, leaves or {}, None, {}, 0, 0, {}, what)


def test_members_that_remember_name_the_micro_batch() -> None:
    said = [says("w0", {3: 1, 7: 1}, told()), says("w1", {3: 1, 7: 2}), says("w2")]
    found = first_difference(said)
    assert found is not None
    assert (found[0], found[1].digests) == ([7], {"w0": 1, "w1": 2})


def test_what_a_lost_member_has_told_with_the_sums_still_counts() -> None:
    """All compute all of these micro-batches again, and compare the digest of them together."""
    said = [says("w0", {3: 1, 7: 1}), says("w2", what=told())]
    found = first_difference(said)
    assert found is not None
    assert (found[0], found[1].digests) == ([3, 7], {"w0": 1, "w1": 2})
    assert named(found[0]) == "micro-batch 3 or 7"


def test_where_all_are_there_and_remember_the_same_nothing_is_known() -> None:
    said = [says("w0", {3: 1}), says("w1", {3: 1}, told()), says("w2")]
    assert first_difference(said) is None
    assert first_difference([says("w0"), says("w2")]) is None


def test_a_lost_member_whose_state_was_not_that_of_most_is_wrong() -> None:
    known = told(w0=4, w1=5, w2=4)
    assert known.odd == ["w1"]
    verdict = of_lost([says("w0", what=known), says("w2", what=known)])
    assert verdict is not None
    assert verdict.wrong == ("w1",)
    assert of_lost([says(one, what=known) for one in IDS]) is None
    assert told(w0=4, w1=5).odd == []
