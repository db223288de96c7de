"""The overview of a run, folded from the ends of its files: the same fold as while it trains."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.core.events import Event, StepFinished
from unisono.core.words import script_in
from unisono.record.history.journal_blocks import Lines
from unisono.record.history.machines import read_use
from unisono.record.history.story_events import StoryLines
from unisono.record.journal.lines import from_line
from unisono.record.journal.times import read_times
from unisono.record.overview import Overview, OverviewBuilder, Past
from unisono.record.rundir import USE_FILE

__all__ = ["Fold"]

LAST_EVENTS: Final = 2000
"""So many of the newest events are folded, and those that come; of older ones, who came and went."""
CAME_AND_WENT: Final = ("start", "machine-joined", "machine-gone", "joined", "gone", "interruption", "end")
LAST_LINES: Final = 128
"""Of the journal, likewise."""


class Fold:
    """Overview of a run, by its files. Who calls this looks at the journal and the story before (`refresh`)."""

    def __init__(self, directory: Path, lines: Lines, story: StoryLines) -> None:
        self._directory, self._lines, self._story = directory, lines, story
        self._builder = OverviewBuilder()
        self._identity: object = None
        self._run_id = ""
        """Of the last event."""
        self._next_event = self._next_offset = 0
        self._used_until = 0.0

    def overview(self, facts: dict[str, Any], now: float) -> Overview:
        """Return the overview at a moment."""
        self._refresh(facts)
        return self._builder.overview(now)

    def past(self, facts: dict[str, Any]) -> Past:
        """Return who took part, and what interrupted the run."""
        self._refresh(facts)
        return self._builder.past()

    def _refresh(self, facts: dict[str, Any]) -> None:
        identity = (self._lines.turn, self._story.turn, facts.get("run_id"))
        if identity != self._identity:
            self._begin(facts)
            self._identity = identity
        for event, run_id in self._fresh():
            self._take(event, run_id)

    def _take(self, event: Event, run_id: str) -> None:
        if run_id and run_id != self._run_id:
            self._builder.go_on_as(run_id, event.time if self._run_id else 0.0)
            self._run_id = run_id
        self._builder.take(event)

    def _begin(self, facts: dict[str, Any]) -> None:
        first, _ = self._story.read(0, 1)
        started = float(first[0].get("time") or 0.0) if first else 0.0
        started = started or next((block.since for block in self._lines.blocks if block.since), 0.0)
        self._builder = OverviewBuilder(
            run_id=str(facts.get("run_id", "")),
            run_dir=str(self._directory),
            script=_script(facts.get("command")),
            started=started,
        )
        self._run_id = ""
        self._next_event = max(0, len(self._story) - LAST_EVENTS)
        for event, run_id in _events_in(self._story.every(self._next_event, CAME_AND_WENT)):
            self._take(event, run_id)
        self._next_offset = self._lines.offset_of_last(LAST_LINES)
        self._used_until = 0.0

    def _fresh(self) -> list[tuple[Event, str]]:
        """Return what is new, in the order in which it has happened, with the id of the run, if it is said. The story
        stays in its order, whatever the clocks of hosts say.
        """
        told, self._next_event = self._story.read(self._next_event, 10 * LAST_EVENTS)
        found = [*_events_in(told)]
        times = list(itertools.accumulate((event.time for event, _ in found), max))
        lines = self._new_lines()
        for used in read_use(self._directory / USE_FILE, self._used_until)[-1:]:
            self._used_until = used[0].time
            lines = [*used, *lines]
        found += [(event, "") for event in lines]
        if any(event.time == 0.0 for event in lines):  # an older version has written them
            return found
        times += [event.time for event in lines]
        return [found[at] for at in sorted(range(len(times)), key=times.__getitem__)]

    def _new_lines(self) -> list[Event]:
        texts = self._lines.texts(self._next_offset)
        self._next_offset += sum(map(len, texts))
        read = [event for event in map(_event_in, texts) if event is not None]
        first = next((event.step for event in read if isinstance(event, StepFinished)), None)
        told = {each.step: each.workers for each in read_times(self._directory, first)} if first is not None else {}
        return [
            msgspec.structs.replace(event, workers=event.workers or told.get(event.step, {}))
            if isinstance(event, StepFinished)
            else event
            for event in read
        ]


def _events_in(told: Iterable[dict[str, Any]]) -> Iterator[tuple[Event, str]]:
    for each in told:
        event: Event | None = None
        with contextlib.suppress(msgspec.ValidationError):  # a newer version knows other kinds
            event = msgspec.convert(each, Event, strict=False)
        if event is not None and not isinstance(event, StepFinished):
            yield event, str(each.get("run_id", ""))


def _event_in(text: bytes) -> Event | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return from_line(json.loads(text))
    return None


def _script(command: Any) -> str:
    arguments = command.get("arguments") if isinstance(command, dict) else None
    return script_in(arguments) if isinstance(arguments, list) else ""
