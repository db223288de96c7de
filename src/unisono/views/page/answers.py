"""Answers to the questions of a page, or of another program that watches.

A question is ``{"get": "series", "names": ["loss"], "points": 800}``, its answer ``{"series": {...}}`` or ``{"error":
"a sentence"}``; `unisono.views.page.viewers` deals with the ``id`` that a viewer gives to its question. ``run`` says of
which run, where several are watched. Questions come from whoever may look at the run, so each is read strictly, and
none can ask for more than a page can draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final, Protocol

import msgspec

from unisono.record.overview import Overview, Past, with_sentence

__all__ = ["MOST_BYTES", "MOST_EVENTS", "MOST_POINTS", "Readable", "answer"]

MOST_BYTES: Final = 16 * 2**20
"""A head sends no longer answer."""
MOST_POINTS: Final = 4_000
MOST_NAMES: Final = 100
MOST_EVENTS: Final = 5_000
PROBLEM_PAGES: Final = 20
"""Problems are looked for among the last ``PROBLEM_PAGES * MOST_EVENTS`` events."""


class Readable(Protocol):
    """A run that can be looked at: `unisono.record.history.History`, or the present of one, as its head knows it."""

    @property
    def notes(self) -> list[str]: ...
    def facts(self) -> dict[str, Any]: ...
    def names(self) -> list[str]: ...
    def span(self) -> tuple[int, int]: ...
    def series(
        self, names: Sequence[str], first: int = 0, last: int = -1, points: int = 1000
    ) -> dict[str, dict[str, Any]]: ...
    def times(self, first: int = 0, last: int = -1, points: int = 200) -> dict[str, Any]: ...
    def events(self, after: int = 0, most: int = 500) -> dict[str, Any]: ...
    def use(self, points: int = 500) -> dict[str, Any]: ...
    def overview(self) -> Overview: ...
    def past(self) -> Past: ...


class _Question(msgspec.Struct, forbid_unknown_fields=True, tag_field="get", kw_only=True):
    run: int = 0


class _Overview(_Question, tag="overview"):
    def of(self, history: Readable) -> Any:
        return msgspec.to_builtins(history.overview())


class _Facts(_Question, tag="facts"):
    def of(self, history: Readable) -> Any:
        return history.facts()


class _Names(_Question, tag="names"):
    def of(self, history: Readable) -> Any:
        first, last = history.span()
        return {"names": history.names(), "first": first, "last": last, "notes": history.notes}


class _Series(_Question, tag="series"):
    names: list[str]
    first: int = 0
    last: int = -1
    points: int = 1000

    def of(self, history: Readable) -> Any:
        if len(self.names) > MOST_NAMES:
            raise ValueError(f"`names` has {len(self.names)} names; ask for at most {MOST_NAMES} at a time")
        known = set(history.names())
        if unknown := [name for name in self.names if name not in known]:
            raise ValueError(f"the run has no series {unknown[0][:100]!r}; `names` lists those it has")
        return history.series(self.names, self.first, self.last, _points(self.points))


class _Times(_Question, tag="times"):
    first: int = 0
    last: int = -1
    points: int = 200

    def of(self, history: Readable) -> Any:
        return history.times(self.first, self.last, _points(self.points))


class _Events(_Question, tag="events"):
    after: int = 0
    most: int = 500

    def of(self, history: Readable) -> Any:
        if not 1 <= self.most <= MOST_EVENTS:
            raise ValueError(f"`most` must be 1 to {MOST_EVENTS}; got {self.most}")
        page = history.events(self.after, self.most)
        return {**page, "events": [with_sentence(event) for event in page["events"]]}


class _Past(_Question, tag="past"):
    def of(self, history: Readable) -> Any:
        return msgspec.to_builtins(history.past())


class _Use(_Question, tag="use"):
    points: int = 500

    def of(self, history: Readable) -> Any:
        return history.use(_points(self.points))


class _Problems(_Question, tag="problems"):
    def of(self, history: Readable) -> Any:
        found: list[Any] = []
        after = -PROBLEM_PAGES * MOST_EVENTS
        for _ in range(PROBLEM_PAGES):
            page = history.events(after, MOST_EVENTS)
            found += [event for event in page["events"] if event.get("kind") == "problem"]
            if not page["events"]:
                break
            after = page["next"]
        return found


class _Runs(_Question, tag="runs"):
    pass


_OF_A_RUN: Final = (_Overview, _Facts, _Names, _Series, _Times, _Events, _Past, _Use, _Problems)
_OfARun = _Overview | _Facts | _Names | _Series | _Times | _Events | _Past | _Use | _Problems
_TAGS: Final = ", ".join(str(kind.__struct_config__.tag) for kind in (*_OF_A_RUN, _Runs))


def _points(points: int) -> int:
    if not 1 <= points <= MOST_POINTS:
        raise ValueError(f"`points` must be 1 to {MOST_POINTS}; got {points}")
    return points


def answer(histories: Sequence[Readable], question: Any) -> dict[str, Any]:
    """Answer a question about one of the runs. Raises nothing: what is wrong is said in the answer.

    Args:
        question: as it came out of JSON, without its ``id``; anything.
    """
    try:
        asked: _OfARun | _Runs = msgspec.convert(question, _OfARun | _Runs)
    except msgspec.ValidationError as error:
        return {"error": f"this is not a question that can be answered ({error}); `get` is one of {_TAGS}"}
    try:
        if isinstance(asked, _Runs):
            return {"runs": [_run(number, history) for number, history in enumerate(histories)]}
        if not 0 <= asked.run < len(histories):
            raise ValueError(f"there is no run {asked.run}: runs are numbered from 0 to {len(histories) - 1}")
        return {str(type(asked).__struct_config__.tag): asked.of(histories[asked.run])}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _run(number: int, history: Readable) -> dict[str, Any]:
    overview = history.overview()
    name = PurePath(overview.run_dir).name or overview.run_id or f"run {number}"
    return {
        "run": number,
        "name": name,
        "run_id": overview.run_id,
        "directory": overview.run_dir,
        "state": overview.state,
        "step": overview.step,
    }
