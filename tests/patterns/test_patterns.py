"""Trainings as practitioners write them give the same bits on any number of workers, or are refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patterns.corpus import load
from tests.patterns.expected import EXPECTED
from tests.patterns.measure import CLASSES, measure


def test_every_pattern_has_an_expected_class() -> None:
    """And none is expected that is gone."""
    assert set(load()) == set(EXPECTED)
    assert set(EXPECTED.values()) <= set(CLASSES)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("name", load())
def test_a_pattern_is_of_its_class(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Alone, on two workers and on three: equal to the bit, refused, or known to be neither."""
    verdict = measure(name, tmp_path / "runs")
    record_property("pattern", (name, verdict.kind, verdict.detail))
    assert verdict.kind == EXPECTED[name], verdict.detail
