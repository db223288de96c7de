"""Trainings on an accelerator, emulated: the bits are those of the CPU, on one worker and on several.

The two are on one card, so their sums travel by way of the host's memory.
"""

from __future__ import annotations

import pytest

from tests.emulated.apart import found_by
from tests.workers.models import RECIPES

TRAININGS = ("mixed", "scaler")
"""In `make test`, which has most of an exchange with a device in it; `make test-more` has the others."""
NOT_THERE = {
    "tied": "module.to() makes new parameters on the emulated device",
    "lstm": "the emulated device has no such operation",
    "autocast": "the recipe asks for that of the CPU",
}
REST = tuple(name for name in RECIPES if name not in (*TRAININGS, *NOT_THERE))


WITHOUT_FLOAT64 = ("cnn", "transformer", "fused", "checkpointed", "frozen", "channels last")
"""Without those that have such parameters, and torch's GradScaler, which needs such numbers."""


NONE_DIFFERS: dict[str, list[str]] = {"alone": [], "first of two": [], "second of two": []}


@pytest.mark.parametrize("names", [TRAININGS, pytest.param(REST, marks=pytest.mark.more)], ids=["two", "the rest"])
def test_the_bits_are_those_of_the_cpu(names: tuple[str, ...]) -> None:
    assert found_by("trainings", *names) == NONE_DIFFERS


@pytest.mark.more
def test_a_device_without_float64_adds_on_the_cpu() -> None:
    """As Apple's, for which there is no machine here."""
    assert found_by("trainings", *WITHOUT_FLOAT64, EMULATED_WITHOUT_FLOAT64="1") == NONE_DIFFERS
