"""The overview of a run, folded from the ends of its files: the same fold as while it trains."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.events import Event, RunEnded, StepFinished
from unisono.history.lines import Lines
from unisono.history.machines import used_in
from unisono.history.story import Story
from unisono.journal.lines import from_line
from unisono.journal.ranges import newest
from unisono.journal.times import TIMES, workers_in
from unisono.overview import Overview, OverviewBuilder
from unisono.rundir import USE_FOLDER
from unisono.words import script_in

__all__ = ["Fold"]

LAST_EVENTS: Final = 2000
"""So many of the newest events are folded, and those that come."""
LAST_BLOCKS: Final = 2
"""Blocks of the journal, likewise."""
PATIENCE_S: Final = 2.0
"""How long a step waits for the times of its workers, which are written a moment later."""
MOST_WAITING: Final = 500
"""At most so many lines wait."""


class Fold:
    """Overview of a run, by its files. Who calls this looks at the journal and the story before (`refresh`)."""

    def __init__(self, directory: Path, lines: Lines, story: Story) -> None:
        self._directory, self._lines, self._story = directory, lines, story
        self._builder = OverviewBuilder()
        self._identity: object = None
        self._next_event = self._next_offset = 0
        self._last_step = -1
        self._used_until = 0.0

    def overview(self, facts: dict[str, Any], now: float) -> Overview:
        """Return the overview at a moment."""
        identity = (self._lines.turn, self._story.turn, facts.get("run_id"))
        if identity != self._identity:
            self._begin(facts)
            self._identity = identity
        for event, number in self._fresh(now):
            self._builder.take(event, number)
        return self._builder.overview(now)

    def _begin(self, facts: dict[str, Any]) -> None:
        blocks = self._lines.blocks
        started = next((block.since for block in blocks if block.since), 0.0)
        self._builder = OverviewBuilder(
            run_id=str(facts.get("run_id", "")),
            run_dir=str(self._directory),
            script=_script(facts.get("command")),
            started=started,
        )
        self._next_event = max(0, len(self._story) - LAST_EVENTS)
        self._next_offset = blocks[-LAST_BLOCKS:][0].offset if blocks else 0
        self._last_step, self._used_until = -1, 0.0

    def _fresh(self, now: float) -> list[tuple[Event, int]]:
        """Return what is new, in the order in which it has happened; with the number of its line, if it has one."""
        told, self._next_event = self._story.read(self._next_event, 10 * LAST_EVENTS)
        found: list[tuple[Event, int]] = []
        for each in told:
            event: Event | None = None
            with contextlib.suppress(msgspec.ValidationError):  # a newer version knows other kinds
                event = msgspec.convert(each, Event, strict=False)
            if event is not None and not isinstance(event, StepFinished):
                found.append((event, -1))
        for row in newest(self._directory / USE_FOLDER, 1).rows:
            if row.last > self._used_until:
                self._used_until = row.last
                found += [(used, -1) for used in used_in(row)]
        lines = self._new_lines(now)
        if any(event.time == 0.0 for event, _ in lines):  # an older version has written them
            return [*found, *lines]
        return sorted([*found, *lines], key=_when)

    def _new_lines(self, now: float) -> list[tuple[Event, int]]:
        texts = self._lines.texts(self._next_offset)
        if not texts:
            return []
        reading = newest(self._directory / TIMES, len(texts) + 2)
        records = {int(row.first): row.record for row in reading.rows}
        columns = reading.header.get("columns", [])
        newest_row = max(records, default=-1)
        found: list[tuple[Event, int]] = []
        for at, text in enumerate(texts):
            event, number = _event_in(text)
            if isinstance(event, StepFinished) and records:
                before = records.get(event.step - 1)
                is_young = now - event.time < PATIENCE_S and len(texts) - at < MOST_WAITING
                if before is None and event.step - 1 > newest_row and is_young:
                    break
                record = records.get(event.step) or before
                if record is not None and not event.workers:
                    workers = workers_in(columns, record, before or {})
                    event = msgspec.structs.replace(event, workers=workers)
            if isinstance(event, StepFinished):
                self._last_step = event.step
            elif isinstance(event, RunEnded) and event.step < 0:
                event = msgspec.structs.replace(event, step=self._last_step)
            self._next_offset += len(text)
            if event is not None:
                found.append((event, number))
        return found


def _event_in(text: bytes) -> tuple[Event | None, int]:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        line = json.loads(text)
        return from_line(line), int(line.get("line", -1))
    return None, -1


def _when(each: tuple[Event, int]) -> float:
    return each[0].time


def _script(command: Any) -> str:
    arguments = command.get("arguments") if isinstance(command, dict) else None
    return script_in(arguments) if isinstance(arguments, list) else ""
