"""Questions of a page are read strictly, and every one has an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from unisono.record.overview import Overview, Past
from unisono.views.page.answers import MOST_EVENTS, MOST_NAMES, MOST_POINTS, answer


class Small:
    """A run of three steps; remembers what it was asked for."""

    notes = ("a line is broken",)

    def __init__(self, name: str = "small", events: Sequence[dict[str, Any]] = ()) -> None:
        self._name = name
        self._events = list(events)
        self.asked: list[Any] = []

    def facts(self) -> dict[str, Any]:
        return {"recipe": {"seed": 7}}

    def names(self) -> list[str]:
        return ["loss", "log/accuracy"]

    def span(self) -> tuple[int, int]:
        return 0, 2

    def series(self, names: Sequence[str], first: int = 0, last: int = -1, points: int = 1000) -> dict[str, Any]:
        self.asked.append((list(names), first, last, points))
        return {name: {"step": [0, 1, 2], "low": [1.0], "high": [1.0], "mean": [1.0]} for name in names}

    def times(self, first: int = 0, last: int = -1, points: int = 200) -> dict[str, Any]:
        return {"workers": ["w0"], "step": [0], "values": {}}

    def events(self, after: int = 0, most: int = 500) -> dict[str, Any]:
        begin = max(0, len(self._events) + after) if after < 0 else min(after, len(self._events))
        return {"events": self._events[begin : begin + most], "next": min(len(self._events), begin + most)}

    def use(self, points: int = 500) -> dict[str, Any]:
        raise OSError("the disk is gone")

    def past(self) -> Past:
        return Past([], [], [])

    def overview(self) -> Overview:
        return Overview(run_dir=f"runs/{self._name}", step=2, loss=None, loss_is="nan", logs={"accuracy": math.nan})


@pytest.mark.parametrize("kind", ["overview", "facts", "names", "series", "times", "events", "past", "problems"])
def test_an_answer_has_the_kind_of_its_question(kind: str) -> None:
    question: dict[str, Any] = {"get": kind}
    if kind == "series":
        question["names"] = ["loss"]
    found = answer([Small()], question)
    assert set(found) == {kind}
    json.loads(msgspec.json.encode(found))


@pytest.mark.parametrize(
    "question",
    [
        None,
        3,
        [],
        {},
        {"get": "nothing"},
        {"get": 3},
        {"get": "series"},
        {"get": "series", "names": "loss"},
        {"get": "series", "names": ["unknown"]},
        {"get": "series", "names": ["loss"] * (MOST_NAMES + 1)},
        {"get": "series", "names": ["loss"], "points": 0},
        {"get": "series", "names": ["loss"], "points": MOST_POINTS + 1},
        {"get": "series", "names": ["loss"], "first": "0"},
        {"get": "series", "names": ["loss"], "path": "/etc/passwd"},
        {"get": "events", "most": MOST_EVENTS + 1},
        {"get": "events", "most": 0},
        {"get": "times", "points": 10**9},
        {"get": "use", "points": -1},
        {"get": "overview", "run": 1},
        {"get": "overview", "run": -1},
        {"get": "overview", "run": True},
    ],
    ids=str,
)
def test_what_is_no_question_is_answered_with_a_sentence(question: Any) -> None:
    small = Small()
    found = answer([small], question)
    assert set(found) == {"error"}
    assert len(found["error"]) > 10
    assert small.asked == []


def test_what_a_run_cannot_tell_is_an_error_and_not_an_end() -> None:
    assert answer([Small()], {"get": "use"}) == {"error": "the disk is gone"}


def test_a_question_says_of_which_run() -> None:
    runs = [Small("one"), Small("two")]
    names = [each["name"] for each in answer(runs, {"get": "runs"})["runs"]]
    assert names == ["one", "two"]
    answer(runs, {"get": "series", "names": ["loss"], "first": 5, "last": 9, "points": 10, "run": 1})
    assert runs[0].asked == []
    assert runs[1].asked == [(["loss"], 5, 9, 10)]


def test_numbers_that_json_does_not_know_are_null() -> None:
    assert json.loads(msgspec.json.encode(answer([Small()], {"get": "overview"})))["overview"]["logs"] == {
        "accuracy": None
    }


def test_problems_are_found_among_all_events() -> None:
    quiet = [{"kind": "announcement", "text": str(number)} for number in range(MOST_EVENTS + 10)]
    problem = {"kind": "problem", "text": "it went wrong"}
    assert answer([Small(events=[problem, *quiet, problem])], {"get": "problems"})["problems"] == [problem, problem]
