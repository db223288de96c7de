"""Values of a script as texts: equal if and only if the values are, whatever process they are in."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unisono.tools.check.value_texts import MISSING, resolve, text_of


class Model:
    kind = "small"

    def __init__(self) -> None:
        self.scale = 0.5
        self._buffers = {"mean": 3.0}
        self.asked = 0

    @property
    def counted(self) -> int:
        self.asked += 1
        return self.asked


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 2), (1, 1.0), (0.0, -0.0), ("a", "b"), ([1, 2], [2, 1]), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}), (None, 0)],
)
def test_values_that_differ_have_texts_that_differ(a: Any, b: Any) -> None:
    assert text_of(a) != text_of(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [({"a": 1, "b": 2}, {"b": 2, "a": 1}), (set("abc"), set("cba")), (Model(), Model()), ([0.1 + 0.2], [0.1 + 0.2])],
)
def test_values_with_the_same_content_have_the_same_text(a: Any, b: Any) -> None:
    assert text_of(a) == text_of(b)


def test_a_generator_that_was_drawn_from_has_another_text() -> None:
    generator = random.Random(3)
    before = text_of(generator)
    assert text_of(random.Random(3)) == before
    generator.random()
    assert text_of(generator) != before


def test_a_long_value_has_a_short_text_that_still_tells_it_apart() -> None:
    a, b = list(range(500)), [*range(499), 7]
    assert len(text_of(a)) < 60
    assert text_of(a) != text_of(b)


def test_a_value_whose_text_fails_is_named_by_its_type() -> None:
    class Broken(list[int]):
        def __len__(self) -> int:
            raise RuntimeError("no")

    assert text_of(Broken()) == "<Broken: RuntimeError>"


def test_paths_are_resolved_without_running_code_of_the_script() -> None:
    model = Model()
    names = {"model": model}
    assert resolve("model.scale", names, {}) == 0.5
    assert resolve("model.mean", names, {}) == 3.0
    assert resolve("model.kind", names, {}) == "small"
    assert resolve("model", {}, names) is model
    assert resolve("model.counted", names, {}) is MISSING
    assert resolve("model.nothing.more", names, {}) is MISSING
    assert model.asked == 0


class Slotted:
    __slots__ = ("mean", "scale")

    def __init__(self) -> None:
        self.scale = 0.5


def test_a_slot_is_read_and_one_that_is_empty_has_no_value() -> None:
    assert resolve("one.scale", {"one": Slotted()}, {}) == 0.5
    assert resolve("one.mean", {"one": Slotted()}, {}) is MISSING, "as in the first statement of __init__"
