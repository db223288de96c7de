"""When a member codes what it sends: by its link, its coder, the settings and the others."""

from __future__ import annotations

import itertools

import pytest

from unisono.core.coding_rules import LOOKS, TRIAL_VOTES, CodingRule, Mode, Word, coding_members
from unisono.core.link_speed import LinkUse

MB = 1 << 20
STEP = 4 * MB
FP32, BF16, CHANGES = 0.84, 0.69, 0.63


def after(mbit: float, share: float, coder_s: float, *, votes: int = 8) -> tuple[list[Word], int]:
    """The words of a member with such a link and such a coder, and how many trials it has made."""
    rule, words, trials = CodingRule(Mode.AUTO, can_code=True), [], 0
    for _ in range(votes):
        trials += rule.wants_trial
        vote(rule, mbit, share, coder_s)
        words.append(rule.word())
    return words, trials


def vote(rule: CodingRule, mbit: float, share: float = FP32, coder_s: float = 2.5e-9) -> None:
    """What a member measures until it votes."""
    if rule.wants_trial or rule._is_on:
        rule.note_coded(STEP, int(share * STEP), 0.7 * coder_s * STEP)
        rule.note_decoded(STEP, 0.3 * coder_s * STEP)
    rule.note_link([LinkUse(STEP, 8 * STEP / (1e6 * mbit))])


COSTS_S = 2.5e-9
TABLE = [
    (10, FP32, True),
    (100, FP32, True),
    (100, BF16, True),
    (300, FP32, True),
    (1000, FP32, False),
    (500, BF16, True),
    (1000, CHANGES, False),
    (700, CHANGES, True),
    (10_000, FP32, False),
    (10_000, CHANGES, False),
    (40_000, BF16, False),
]


@pytest.mark.parametrize(("mbit", "share", "is_on"), TABLE)
def test_a_member_codes_where_the_link_is_slower_than_the_coder(mbit: float, share: float, is_on: bool) -> None:
    words, trials = after(mbit, share, COSTS_S)
    assert words[:2] == [Word.PLAIN] * 2, "little was measured before these votes"
    assert words[-1] == (Word.CODED if is_on else Word.PLAIN)
    assert trials <= 1


def test_on_a_fast_link_the_coder_is_not_even_measured() -> None:
    assert after(10_000, FP32, COSTS_S, votes=1000) == ([Word.PLAIN] * 1000, 0)


def test_a_coder_that_did_not_pay_is_tried_again_now_and_then() -> None:
    words, trials = after(1000, FP32, COSTS_S, votes=4 * TRIAL_VOTES)
    assert {*words} == {Word.PLAIN}
    assert 3 <= trials <= 5


def test_a_link_that_gets_slow_or_fast_is_noticed_within_some_steps() -> None:
    rule, words = CodingRule(Mode.AUTO, can_code=True), []
    for mbit in [20_000] * 10 + [100] * 20 + [20_000] * 20:
        vote(rule, mbit)
        words.append(rule.word())
    kinds = [(word, len([*group])) for word, group in itertools.groupby(words)]
    assert [word for word, _ in kinds] == [Word.PLAIN, Word.CODED, Word.PLAIN]
    assert kinds[0][1] <= 10 + LOOKS
    assert kinds[1][1] <= 20


def test_a_link_that_is_slow_for_a_moment_is_not_slow() -> None:
    """As a process looks that waits for a core."""
    rule = CodingRule(Mode.AUTO, can_code=True)
    for number in range(100):
        vote(rule, 50 if number % 5 in (1, 3) else 20_000)
        assert rule.word() == Word.PLAIN
        assert not rule.wants_trial


def test_links_that_are_used_at_the_same_time_are_one() -> None:
    """Each of ten carries a tenth of the bytes, all in the same time."""
    one, ten = (CodingRule(Mode.AUTO, can_code=True) for _ in range(2))
    for _ in range(2):
        one.note_link([LinkUse(STEP, 0.3)])
        ten.note_link([LinkUse(STEP // 10, 0.3)] * 10)
    assert one._link_s == pytest.approx(ten._link_s, rel=1e-4)


def test_where_the_kernel_does_not_count_nothing_is_coded() -> None:
    rule = CodingRule(Mode.AUTO, can_code=True)
    for _ in range(5):
        rule.note_link([])
        assert rule.word() == Word.PLAIN
        assert not rule.wants_trial


@pytest.mark.parametrize(
    ("mode", "can_code", "word"),
    [
        (Mode.ALWAYS, True, Word.CODED),
        (Mode.ALWAYS, False, Word.CANNOT),
        (Mode.NEVER, True, Word.CANNOT),
        (Mode.NEVER, False, Word.CANNOT),
        (Mode.AUTO, False, Word.CANNOT),
    ],
)
def test_the_settings_overrule_the_measurement(mode: Mode, can_code: bool, word: Word) -> None:
    rule = CodingRule(mode, can_code=can_code)
    rule.note_link([LinkUse(STEP, 3.0)])
    rule.note_link([LinkUse(STEP, 3.0)])
    assert rule.word() == word
    assert not rule.wants_trial


@pytest.mark.parametrize(
    ("words", "senders"),
    [
        ([1, 1, 1], (False, False, False)),
        ([1, 2, 1], (False, True, False)),
        ([2, 2, 2], (True, True, True)),
        ([2, 0, 2], (False, False, False)),
        ([2, 7, 2], (False, False, False)),
    ],
)
def test_nobody_codes_while_one_cannot(words: list[int], senders: tuple[bool, ...]) -> None:
    """A word that is none is that of a member that cannot."""
    assert coding_members(words) == senders


@pytest.mark.parametrize("can_code", [True, False])
def test_who_lacks_the_coder_is_named_only_where_it_costs_time(can_code: bool) -> None:
    slow, fast = (CodingRule(Mode.AUTO, can_code=can_code) for _ in range(2))
    for rule, mbit in ((slow, 100), (fast, 20_000)):
        for _ in range(4):
            vote(rule, mbit)
            rule.word()
    words = [Word.CODED, Word.CANNOT, Word.CANNOT]
    assert (slow.misses(words), fast.misses(words)) == ([1, 2], [])
    assert CodingRule(Mode.NEVER, can_code=True).misses(words) == []
