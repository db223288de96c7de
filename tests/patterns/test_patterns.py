"""Trainings as practitioners write them give the same bits on any number of workers, or are refused in words.

By default a part of them runs (`PART`), and one that gives the same bits runs alone and on one team, of two or of three
workers in turns. UNISONO_TEST_ALL takes all of them and both teams. Where and how another one ends depends on the team,
so it always runs on both. The legs that a pattern names always run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.patterns.corpus import load
from tests.patterns.expected import EXPECTED, PART
from tests.patterns.measure import CLASSES, TEAMS, measure

CASES = [
    (name, TEAMS if ALL or EXPECTED.get(name) != "identical" else TEAMS[number % 2 :][:1])
    for number, name in enumerate(load())
    if ALL or name in PART
]


def test_every_pattern_has_an_expected_class() -> None:
    """And none is expected that is gone."""
    assert set(load()) == set(EXPECTED)
    assert set(EXPECTED.values()) <= set(CLASSES)
    assert set(EXPECTED) >= PART
    assert {EXPECTED[name] for name in PART} == set(EXPECTED.values())


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("name", "teams"), CASES, ids=[name for name, _ in CASES])
def test_a_pattern_is_of_its_class(
    name: str, teams: Sequence[int], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Alone, on two workers or on three, and by its legs: equal to the bit, refused, or known to be neither."""
    verdict = measure(name, tmp_path / "runs", teams)
    record_property("pattern", (name, verdict.kind, verdict.detail))
    assert verdict.kind == EXPECTED[name], verdict.detail
