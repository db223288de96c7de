"""Events of a run that are no steps, as a reader sees them: ``events.jsonl``, by number."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from re import Pattern
from typing import Any, Final, get_args

import msgspec

from unisono.core.events import Event
from unisono.system.owned import open_regular

__all__ = ["StoryLines"]

PIECE_BYTES: Final = 1 << 20
EVENTS_AT_ONCE: Final = 5_000
MOST_LINE_BYTES: Final = 64 << 20
_KINDS: Final = frozenset(each.__struct_config__.tag for each in get_args(Event))
_ODD: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class StoryLines:
    """Lines of a file of events that may grow while it is read. Keeps where the lines are, and not the lines.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._starts = array("Q", [0])
        self.turn = 0
        """Grows when the file is another one, or was cut."""
        self._identity: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._starts) - 1

    def refresh(self) -> None:
        """Look at what is new."""
        self.notes = []
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._starts[-1]:
                    self._starts = array("Q", [0])
                    self.turn += 1
                    self._identity = (found.st_dev, found.st_ino)
                at = self._starts[-1]
                file.seek(at)
                while data := file.read(PIECE_BYTES):
                    if at - self._starts[-1] > MOST_LINE_BYTES:
                        raise OSError(errno.EFBIG, f"a line has more than {MOST_LINE_BYTES >> 20} MiB")
                    end = data.find(b"\n") + 1
                    while end > 0:
                        self._starts.append(at + end)
                        end = data.find(b"\n", end) + 1
                    at += len(data)
        except FileNotFoundError:
            self._starts, self._identity = array("Q", [0]), None
        except OSError as error:
            self.notes = [f"{self.path} cannot be read: {error.strerror or error}"]

    def read(self, after: int, most: int, wanted: Pattern[bytes] | None = None) -> tuple[list[dict[str, Any]], int]:
        """Return at most ``most`` events from number ``after`` on, and the number of the next one.

        Args:
            after: negative: the last so many.
            wanted: lines without it are left out, and not read as JSON.
        """
        begin = max(0, len(self) + after) if after < 0 else min(after, len(self))
        end = min(len(self), begin + max(0, most))
        found: list[dict[str, Any]] = []
        if end > begin:
            try:
                with open_regular(self.path) as file:
                    data = os.pread(file.fileno(), self._starts[end] - self._starts[begin], self._starts[begin])
            except OSError:
                return [], begin
            for text in data.splitlines():
                if wanted is not None and wanted.search(text) is None:
                    continue
                try:
                    event = _event_in(text)
                except (ValueError, KeyError, TypeError, RecursionError):
                    self._note(text)
                    continue
                found.append(event)
        return found, end

    def every(self, end: int, kinds: Collection[str]) -> Iterator[dict[str, Any]]:
        """Yield the events of these kinds before that number, the oldest first; without kinds, all of them."""
        wanted = re.compile(b'"kind": ?"(?:%b)"' % "|".join(kinds).encode()) if kinds else None
        following = 0
        while following < end:
            found, after = self.read(following, min(EVENTS_AT_ONCE, end - following), wanted)
            yield from (each for each in found if not kinds or each["kind"] in kinds)
            if after == following:
                return  # the file cannot be read
            following = after

    def _note(self, text: bytes) -> None:
        said = f"a line of {self.path} is not an event: {text[:40].decode(errors='replace')!r}"
        if len(self.notes) < 3 and said not in self.notes:
            self.notes.append(said)


def _event_in(text: bytes) -> dict[str, Any]:
    """Return the event of a line, as it stands there: whoever reads it need not look at types.

    Raises:
        ValueError, KeyError, TypeError: the line is no event, or not as this version writes those of its kind. Of a
            kind that this version does not know, only the time is looked at.
    """
    event: dict[str, Any] = json.loads(text)
    if event["kind"] in _KINDS:
        try:
            msgspec.convert(event, Event)
        except msgspec.ValidationError:
            msgspec.convert({name: _number(value) for name, value in event.items()}, Event)
    elif not isinstance(event["kind"], str) or not isinstance(event["time"], int | float):
        raise ValueError
    return event


def _number(value: Any) -> Any:
    """Return a value of a line; a number that JSON does not have, as a number."""
    return _ODD.get(value, value) if isinstance(value, str) else value
