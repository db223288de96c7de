"""Journal of one member: a sink that writes while this member is the writer."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from unisono.core.events import LinesLost, StepFinished
from unisono.record.journal import chain
from unisono.record.journal.file import tail, truncate
from unisono.record.journal.lines import Line, LineEvent, from_line, text_of, to_line
from unisono.record.journal.newest import Newest
from unisono.record.journal.times import TIMES, record_of

__all__ = ["MOST_KEPT_LINES", "Journal"]

KEPT_LINES = 4
"""Keep so many of the newest lines in any case."""
KEPT_FOR_COPY = 500
"""Keep so many where this machine does not see the file."""
MOST_KEPT_LINES = 1000
"""Keep at most so many of the lines that may be missing in the file."""
LINES_AT_ONCE = 32
"""While the disk is full, each step tries to write so many lines, and not all kept lines."""

E = TypeVar("E", bound=LineEvent)


class Journal:
    """One member's journal. All members emit the same events into it, so their lines have the same numbers.

    Args:
        path: None keeps nothing.
        is_there: returns whether the directory is still that of the run; called before every write.
    """

    def __init__(self, path: Path | None, is_there: Callable[[], bool] = lambda: True) -> None:
        self._path = path
        self._name = os.fspath(path) if path is not None else ""
        self._is_there = is_there
        self._is_writer = False
        self._recent: deque[LineEvent] = deque()
        self._number = 0
        self._in_file = 0  # all lines before this one are in the file, as far as this member knows
        self._last: int | None = None  # the last line of the file; None: not known yet
        self._chain = chain.BEGIN  # its value up to that line
        self._failed_at: int | None = None  # the file's size before a line that could not be written
        self._has_warned = False
        self._num_kept = KEPT_LINES
        self._times = Newest(path.parent / TIMES) if path is not None else None
        """None: there is no file."""

    def keep_for_copy(self) -> None:
        """Keep more lines than those that may be missing in the file, which this machine does not see: this member may
        have to go on in a directory of its own.
        """
        self._num_kept = KEPT_FOR_COPY

    def start(self, *, writer: bool) -> list[LineEvent]:
        """Become the writer, or stop being it; the numbers go on. Local.

        A journal that cannot be written is a warning: it is no reason to end a training.

        Returns:
            On a new writer, the kept events that were missing in the file.
        """
        self._is_writer = writer
        self._last = self._failed_at = None
        if self._path is not None:
            self._times = Newest(self._path.parent / TIMES)  # another one may have written since
        return self._write() if writer else []

    def go_on_at(self, number: int, lines: Iterable[str] = ()) -> None:
        """Set, on a newcomer, that the run has ``number`` lines, of which ``lines`` may be missing in the file."""
        if number == 0:
            return  # the run begins, and all members have emitted the same events until here
        self._number = number
        self._recent = deque(map(_event, lines))
        self._in_file = self._recent[0].number if self._recent else number

    @property
    def number(self) -> int:
        """Number of lines that this member knows."""
        return self._number

    @property
    def num_written(self) -> int:
        """Number of lines in the file, as far as its writer knows; 0 on all other members."""
        return self._last + 1 if self._last is not None else 0

    def note_written(self, num_written: int) -> None:
        """Note how many lines the file has, by the writer's report."""
        self._in_file = max(self._in_file, num_written)
        self._forget()

    def unwritten(self) -> list[str]:
        """Return the lines that may be missing in the file, as text."""
        return [_text(each) for each in self._recent if each.number >= self._in_file]

    def emit(self, event: E) -> E:
        """Add the line of an event. Every member emits the same; only the writer writes.

        Returns:
            The event with the line's number.
        """
        event = msgspec.structs.replace(event, number=self._number)
        self._number += 1
        if self._path is not None:
            self._recent.append(event)
            if self._is_writer:
                self._write()
            self._forget()
        return event

    def skip(self) -> None:
        """Count a line, and write none."""
        self._number += 1

    def _forget(self) -> None:
        recent = self._recent
        while recent and len(recent) > (self._num_kept if recent[0].number < self._in_file else MOST_KEPT_LINES):
            recent.popleft()

    def _write(self) -> list[LineEvent]:
        """Write the kept lines that are missing in the file: the newest, and lines that a full disk had no room for.

        Returns:
            The missing lines, whether they could be written or not.
        """
        missing: list[LineEvent] = []
        if self._path is None:
            return missing
        try:
            if not self._is_there():
                self._last = None  # the directory may come back
                return missing
            if self._last is None:
                self._last, self._chain = _take_over(self._path, self._number)
            missing = [each for each in self._recent if each.number > self._last]
            if not missing:
                return missing
            lines = missing
            if (first := missing[0].number) > self._last + 1:
                lines = [LinesLost(number=first - 1, first=self._last + 1, last=first - 1), *missing]
            with FileIO(self._name, "ab") as file:  # each line is written at once, so this is done each step
                for start in range(0, len(lines), LINES_AT_ONCE):
                    self._put(file, lines[start : start + LINES_AT_ONCE])
        except OSError as error:
            self._warn(error)  # training is worth more than its journal
        return missing

    def _put(self, file: FileIO, lines: list[LineEvent]) -> None:
        self._put_times(lines)
        if self._failed_at is not None:  # half a line: the next line would be spoiled too
            file.truncate(self._failed_at)
        self._failed_at = os.fstat(file.fileno()).st_size
        value, texts = self._chain, []
        for each in lines:
            text, value = chain.written(each.number, to_line(each), value)
            texts.append(f"{text}\n")
        data = memoryview("".join(texts).encode())
        while data:
            data = data[file.write(data) :]
        self._last, self._chain, self._failed_at = lines[-1].number, value, None
        self._in_file = self._last + 1

    def _put_times(self, events: Iterable[LineEvent]) -> None:
        """Write what the workers have told with some steps, before their lines: who sees a line finds its times."""
        assert self._times is not None
        told = [record_of(event) for event in events if isinstance(event, StepFinished) and event.workers]
        with contextlib.suppress(OSError):  # the journal's own line says so
            if told:
                self._times.add(told)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the journal {self._path} cannot be written: {error}; training continues, and the last "
                f"{MOST_KEPT_LINES:,} lines are kept until it can be written again",
                stacklevel=3,
            )


def _text(event: LineEvent) -> str:
    return text_of({"line": event.number, **to_line(event)})


def _event(text: str) -> LineEvent:
    event = from_line(json.loads(text))
    assert event is not None, "a member of this run has written it"
    return event


def _take_over(path: Path, number: int) -> tuple[int, bytes]:
    """Cut a journal after its last whole line, and return that line's number (-1: there is none), and the value of the
    chain up to it.

    A writer that was killed while it wrote leaves half a line; the next one writes that line again. So it does with the
    last line of a side of the run that has ended while this one goes on.

    Args:
        number: so many lines are known.
    """
    if not path.exists():
        return -1, chain.BEGIN
    last, broken = _cut(path)
    if last is not None and last["kind"] == "end" and last["line"] < number:
        truncate(path, last["line"])
        last, broken = _cut(path)
    if broken:
        warnings.warn(f"{broken}; the run continues after its last complete line", stacklevel=2)
    return int(last["line"]) if last is not None else -1, chain.value_in(last)


def _cut(path: Path) -> tuple[Line | None, str]:
    """Cut a journal after its last whole line; returns the last line that can be read, and the error in those after."""
    with path.open("r+b") as file:
        end, last, broken = tail(path, file)
        file.truncate(end)
    return last, broken
