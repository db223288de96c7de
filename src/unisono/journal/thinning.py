"""Writes records that are kept for ever in a bounded room (`unisono.journal.levels` has the files)."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.journal.levels import BEGIN, CUTS, FOLD, LEVELS, SCHEMA, Cut, Files, files_of, path_of
from unisono.journal.rows import Row, mean_of

__all__ = ["LEVEL_BYTES", "SEGMENT_BYTES", "Thinned"]

SEGMENT_BYTES: Final = 1 << 20
"""A file that has grown so large is followed by another one."""
LEVEL_BYTES: Final = 16 << 20
"""At most so much is kept of each level (and the file that is being written)."""
INTERVAL_S: Final = 0.5
"""What was added is written at most so often."""
MOST_WAITING: Final = 4096
"""While the disk takes nothing, so many records are kept."""
CLOSE_S: Final = 2.0
"""How long the end of a run waits for a disk that takes nothing."""


class Thinned:
    """Writes records into a directory, which is made when the first one is written. Cheap to call, and never raises.

    A thread of its own writes, at most every half second: neither a full disk nor one that stands still holds up who
    adds. Such a disk costs records, and is one warning.

    Args:
        directory: its parent exists.
        header: is written at the head of each file.
        report: gets the warning.
    """

    def __init__(
        self, directory: Path, header: dict[str, Any] | None = None, report: Callable[[str], None] | None = None
    ) -> None:
        self._directory = directory
        self._header = header or {}
        self._report = report or _warn
        self._waiting: deque[tuple[Callable[..., None], *tuple[Any, ...]]] = deque()
        self._has_work = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._pid = os.getpid()

    def add(self, key: float, record: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        """Add a record. Keys grow, but for small exceptions.

        Args:
            record: JSON, or a function that makes it, in the thread that writes; belongs to this object from now on.
                In means, numbers are averaged, also in dictionaries and in lists of one length; what a record lacks is
                not counted; of other values the last one counts.
        """
        self._put(_Levels.add, key, record)

    def cut(self, key: float) -> None:
        """Take back what was added from a key on."""
        self._put(_Levels.cut, key)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything is written; return False if the disk takes too long."""
        done = threading.Event()
        self._put(_Levels.say, done)
        if self._thread is None:
            return False
        self._is_closing.set()
        try:
            return done.wait(timeout_s)
        finally:
            self._is_closing.clear()

    def close(self) -> None:
        """Write what was added; nothing follows. Waits for a disk that takes nothing, but not long."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._is_closing.set()
        self._waiting.append((_Levels.end,))
        self._has_work.set()
        thread.join(CLOSE_S)

    def _put(self, *work: Any) -> None:
        if len(self._waiting) >= MOST_WAITING and work[0] is _Levels.add:
            self._warn("the disk takes nothing")
            return
        self._waiting.append(work)
        if not self._has_work.is_set():
            self._has_work.set()
        if self._thread is None and not self._is_closing.is_set():
            thread = threading.Thread(target=self._run, name=f"unisono {self._directory.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no memory for it, or too many threads
                self._warn(str(error))
            else:
                self._thread = thread

    def _run(self) -> None:
        levels = _Levels(self._directory, self._header)
        while not levels.is_over:
            self._has_work.wait()
            self._is_closing.wait(INTERVAL_S)
            self._has_work.clear()
            try:
                self._work(levels)
            except FileNotFoundError:
                self._drop(levels)  # the run's directory was removed or moved: the journal says so
            except OSError as error:
                self._drop(levels)
                self._warn(str(error))
            except Exception as error:  # a record that is no JSON: what is only for people ends no training
                self._drop(levels)
                self._warn(f"{type(error).__name__}: {error}")
        levels.close()

    def _work(self, levels: _Levels) -> None:
        while self._waiting and not levels.is_over:
            work, *arguments = self._waiting[0]
            work(levels, *arguments)
            self._waiting.popleft()
        levels.write()

    def _drop(self, levels: _Levels) -> None:
        """Drop the records that cannot be written. What is to be taken back, is so at the next attempt."""
        levels.forget()
        cuts = []
        while self._waiting:
            work = self._waiting.popleft()
            if work[0] is _Levels.end:
                levels.end()
            elif work[0] is _Levels.cut:
                cuts.append(work)
        self._waiting.extendleft(reversed(cuts))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(Exception):
                self._report(
                    f"{self._directory} cannot be written: {why}; training goes on, and what a view would show from "
                    "there is missing"
                )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


class _Level:
    """The files of one level, as their only writer sees them.

    Args:
        least: no row is written before this place any more.
    """

    def __init__(self, directory: Path, level: int, header: dict[str, Any], least: tuple[int, int] = (0, 0)) -> None:
        self._directory, self._level = directory, level
        self._header = msgspec.json.encode({"schema": SCHEMA, "level": level, "fold": FOLD, "header": header}) + b"\n"
        self._sizes = {number: path.stat().st_size for number, path in files_of(directory, level)}
        self.number = max(self._sizes, default=0)
        if self.place < least:  # a disk has lost the end of a file
            self.number = max(self.number, least[0]) + 1
            self._sizes[self.number] = 0
        self._texts: list[bytes] = []
        self._descriptor: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The end of what is written."""
        return self.number, self._sizes.get(self.number, 0)

    def put(self, row: Row) -> None:
        self._texts.append(msgspec.json.encode(row) + b"\n")

    def write(self) -> None:
        texts, self._texts = self._texts, []
        start = 0
        while start < len(texts):
            size = self._open()
            end = start
            while end < len(texts) and (end == start or size < SEGMENT_BYTES):
                size += len(texts[end])
                end += 1
            self._put(b"".join(texts[start:end]))
            start = end
            if self._sizes[self.number] >= SEGMENT_BYTES:
                self.next_file()

    def next_file(self) -> None:
        """Go on in another file, and forget the oldest ones."""
        self.close()
        self.number += 1
        self._sizes[self.number] = 0
        while sum(self._sizes.values()) > LEVEL_BYTES:
            oldest = min(self._sizes)
            path_of(self._directory, self._level, oldest).unlink(missing_ok=True)
            del self._sizes[oldest]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def forget(self) -> None:
        """Drop what was not written, after an error."""
        self._texts.clear()
        with contextlib.suppress(OSError):
            self.close()

    def _open(self) -> int:
        """Open the file, and return its size."""
        if self._descriptor is None:
            path = path_of(self._directory, self._level, self.number)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = self._sizes[self.number] = os.fstat(self._descriptor).st_size
            if size == 0:
                self._put(self._header)
            elif os.pread(self._descriptor, len(self._header), 0) != self._header:  # of another version
                self.next_file()
                return self._open()
            elif os.pread(self._descriptor, 1, size - 1) != b"\n":  # a writer was killed, or the disk was full
                self._put(b"\n")
        return self._sizes[self.number]

    def _put(self, data: bytes) -> None:
        assert self._descriptor is not None
        rest = memoryview(data)
        while rest:
            num_bytes = os.write(self._descriptor, rest)
            self._sizes[self.number] += num_bytes
            rest = rest[num_bytes:]


class _Levels:
    """All levels of a directory, as their only writer sees them. Opened when the first record comes."""

    def __init__(self, directory: Path, header: dict[str, Any]) -> None:
        self._directory = directory
        self._header: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(header))  # as it is read
        self._levels: list[_Level] = []
        self._pending: list[list[Row]] = []  # by level: rows of the level before that no row of this one has yet
        self._last = -math.inf
        self.is_over = False

    def add(self, key: float, record: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        self._open()
        self._last = max(self._last, key)
        self._add(0, Row(key, key, 1, record if isinstance(record, dict) else record()))

    def cut(self, key: float) -> None:
        self._open()
        if key > self._last:
            return
        self.write()
        cut = Cut(key, {str(number): level.place for number, level in enumerate(self._levels)})
        with (self._directory / CUTS).open("ab") as file:
            file.write(b"\n" + msgspec.json.encode(cut) + b"\n")  # also after half a line
        self._go_on()
        self._last = math.nextafter(key, -math.inf)

    def say(self, done: threading.Event) -> None:
        self.write()
        done.set()

    def end(self) -> None:
        self.is_over = True

    def write(self) -> None:
        for level in self._levels:
            level.write()

    def forget(self) -> None:
        for level in self._levels:
            level.forget()

    def close(self) -> None:
        for level in self._levels:
            with contextlib.suppress(OSError):
                level.close()

    def _open(self) -> None:
        if self._levels:
            return
        self._directory.mkdir(exist_ok=True)
        cuts = Files(self._directory).cuts
        self._levels = [
            _Level(
                self._directory,
                level,
                self._header,
                max((cut.before.get(str(level), BEGIN) for cut in cuts), default=BEGIN),
            )
            for level in range(LEVELS)
        ]
        self._go_on()

    def _go_on(self) -> None:
        """Find the rows of each level that the next one has not folded yet, by the files."""
        files = Files(self._directory, self._header)
        pending: list[list[Row]] = [[]]
        for number in range(LEVELS):
            newest = files.newest(number)
            self._last = max([self._last, *(row.last for row in newest)])
            if number + 1 < LEVELS:
                above = files.newest(number + 1)
                done = above[-1].last if above else -math.inf
                pending.append([row for row in newest if row.first > done])
        self._pending = pending
        for number in range(1, LEVELS):
            self._fold(number)

    def _add(self, number: int, row: Row) -> None:
        self._levels[number].put(row)
        if number + 1 < LEVELS:
            self._pending[number + 1].append(row)
            self._fold(number + 1)

    def _fold(self, number: int) -> None:
        pending = self._pending[number]
        while len(pending) >= FOLD:
            rows, pending[:FOLD] = pending[:FOLD], []
            self._add(number, mean_of(rows))
