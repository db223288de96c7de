"""Who is wrong, by what members say when some have computed different values."""

from __future__ import annotations

import pytest

from unisono.core.audit_rules import Record
from unisono.core.errors import DivergenceError
from unisono.core.groups import place_words, places
from unisono.core.rehearsals import key_of
from unisono.core.telemetry import Compared
from unisono.strategies.audit import audits
from unisono.strategies.audit.audits import Audits, first_difference, of_states

WHOLE = "its state"
differ = Audits(share=0.5, then="go-on", seed=0, convict=None).differ


def sent(
    leaf: int = -1, digest: int = 0, other: int = -1, other_digest: int = 0, state: int = 7, part: int = 0
) -> Compared:
    return Compared(
        own_leaf=leaf,
        own_digest=digest,
        other_leaf=other,
        other_digest=other_digest,
        compared_step=5,
        state_digest=state,
        part=part,
    )


def says(worker: str, leaves: dict[int, int] | None = None, arithmetic: int = 0, **states: int) -> audits.Testimony:
    named = {name.replace("_", " "): digest for name, digest in states.items()}
    return by_place(worker, {leaf: {0: digest} for leaf, digest in (leaves or {}).items()}, arithmetic, **named)


def by_place(worker: str, leaves: dict[int, dict[int, int]], arithmetic: int = 0, **states: int) -> audits.Testimony:
    return audits.Testimony(worker, arithmetic, leaves, states, {}, 0, 0)


def test_members_differ_by_a_pair_of_micro_batches() -> None:
    key = key_of([3, 7])
    assert not differ({"w0": sent(key, 1), "w1": sent(other=key, other_digest=1)})
    assert differ({"w0": sent(key, 1), "w1": sent(other=key, other_digest=2)})
    assert not differ({"w0": sent(key, 1), "w1": sent(4, 2)})


def test_members_differ_by_a_state_that_most_do_not_have() -> None:
    assert differ({"w0": sent(), "w1": sent(state=8), "w2": sent()})
    assert not differ({"w0": sent(), "w1": sent(state=8)})  # two: it is an error, and nobody is asked


def test_the_first_micro_batch_that_differs_is_tried() -> None:
    said = [says("w0", {3: 1, 7: 1}), says("w1", {3: 1, 7: 2}), says("w2")]
    found = first_difference(said)
    assert found is not None
    assert (found.key, found.digests) == (7, {"w0": 1, "w1": 2})


def test_members_of_groups_differ_by_what_those_of_the_same_part_have_computed() -> None:
    said = {"w0": sent(3, 1), "w1": sent(3, 2, part=1), "w2": sent(other=3, other_digest=1)}
    assert not differ({**said, "w3": sent(other=3, other_digest=2, part=1)})
    assert differ({**said, "w3": sent(other=3, other_digest=1, part=1)})
    assert not differ({**said, "w3": sent(other=3, other_digest=9, part=2)})


def test_the_first_place_that_differs_is_tried() -> None:
    """Of three parts, the second has got another output: what follows differs, and what was before does not."""
    said = [
        by_place("w0", {4: {0: 1, 5: 6}}),
        by_place("w1", {4: {1: 2, 4: 5}}),
        by_place("w2", {4: {3: 4}}),
        by_place("w3", {4: {0: 1, 5: 66}}),
        by_place("w4", {4: {1: 22, 4: 55}}),
        by_place("w5", {4: {3: 44}}),
    ]
    found = first_difference(said)
    assert found is not None
    assert (found.key, found.place, found.digests) == (4, 1, {"w1": 2, "w4": 22})
    assert [place_words(place, 3) for place in (1, 3)] == ["the output of part 1 in", "the gradient of part 2 in"]
    assert sorted(place for part in range(3) for place in places(part, 3)) == [*range(6)]


def test_of_a_member_that_is_lost_nothing_is_known() -> None:
    """Its partner has computed the same micro-batch, and may be right: nobody is named."""
    assert first_difference([says("w0", {3: 1, 7: 1}), says("w2", {4: 1})]) is None


def test_members_of_other_arithmetic_are_not_compared() -> None:
    said = [says("w0", {3: 1}, its_state=1), says("w1", {3: 2}, 9, its_state=2), says("w2", its_state=1)]
    assert first_difference(said) is None
    assert of_states(said, 5, Record()) is None


def test_a_state_that_most_do_not_have_is_wrong() -> None:
    found = of_states([says("w0", its_state=4), says("w1", its_state=5), says("w2", its_state=4)], 5, Record())
    assert found is not None
    verdict, what = found
    assert (verdict.wrong, verdict.is_of_state, what) == (("w1",), True, WHOLE)
    assert of_states([says("w0", its_state=4), says("w1", its_state=5)], 5, Record()) is None


def test_a_copy_that_most_holders_do_not_have_is_wrong() -> None:
    said = [says("w0", its_state=4, a=1), says("w1", its_state=4, a=2), says("w2", its_state=4, a=1)]
    found = of_states(said, 5, Record())
    assert found is not None
    verdict, what = found
    assert (verdict.wrong, what) == (("w1",), "its copy of a")


def test_two_copies_that_differ_name_both_holders_and_convict_none() -> None:
    with pytest.raises(DivergenceError, match="at step 5 w0 and w1 hold copies of a that differ"):
        of_states([says("w0", its_state=4, a=1), says("w1", its_state=4, a=2)], 5, Record())
