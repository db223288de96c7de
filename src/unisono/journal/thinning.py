"""Records that are kept for ever in a bounded room: the newest as they are, older ones as means of 8, 64, 512 ...

A directory of files ``LEVEL-NUMBER.jsonl``. Level 0 has the records themselves, level 1 means of 8 of them, level 2
means of 64, and so on. All levels are written at the same time, and each forgets its oldest file when it has grown too
large: so the past gets coarser, and nothing is ever rewritten. The first line of a file is a header; each other line is
a `Row`.

``cuts.jsonl`` says where records were taken back: what follows begins at an earlier key again.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["FOLD", "LEVEL_BYTES", "SEGMENT_BYTES", "Reading", "Row", "Thinned", "mean_of", "newest", "read"]

FOLD: Final = 8
"""So many rows of a level become one row of the next."""
LEVELS: Final = 9
SEGMENT_BYTES: Final = 1 << 20
"""A file that has grown so large is followed by another one."""
LEVEL_BYTES: Final = 16 << 20
"""At most so much is kept of each level (and the file that is being written)."""
END_BYTES: Final = 1 << 16
"""So much of a file is read for its newest rows, unless more are asked for."""
HEAD_BYTES: Final = 1 << 14
"""So much of a file is looked at for how long its rows are: the first step of a run has told less than the others."""
INTERVAL_S: Final = 0.5
"""What was added is written at most so often."""
MOST_WAITING: Final = 4096
"""While the disk takes nothing, so many records are kept."""
CLOSE_S: Final = 2.0
"""How long the end of a run waits for a disk that takes nothing."""
DIGITS: Final = 6
CUTS: Final = "cuts.jsonl"
SCHEMA: Final = 1


class Row(msgspec.Struct, frozen=True):
    """A record, or the mean of several that follow each other."""

    first: float
    """Key of the first record in it."""
    last: float
    count: int
    """Number of records in it."""
    record: dict[str, Any]


class Reading(NamedTuple):
    """What a directory has for a range of keys."""

    header: dict[str, Any]
    """As it was given to `Thinned`; empty if there is nothing."""
    rows: list[Row]
    """By key."""
    notes: list[str]
    """What could not be read, in words."""


class _Cut(msgspec.Struct, frozen=True):
    key: float
    before: dict[str, tuple[int, int]]
    """By level: rows before this place (the number of a file, and the offset in it) are taken back from ``key`` on."""


_BEGIN: Final = (0, 0)
_rows: Final = msgspec.json.Decoder(Row)
_cuts: Final = msgspec.json.Decoder(_Cut)


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
            self._thread = threading.Thread(target=self._run, name=f"unisono {self._directory.name}", daemon=True)
            self._thread.start()

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
        self._sizes = {number: path.stat().st_size for number, path in _files(directory, level)}
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
            _path(self._directory, self._level, oldest).unlink(missing_ok=True)
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
            path = _path(self._directory, self._level, self.number)
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
        cut = _Cut(key, {str(number): level.place for number, level in enumerate(self._levels)})
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
        cuts = _Files(self._directory).cuts
        self._levels = [
            _Level(
                self._directory,
                level,
                self._header,
                max((cut.before.get(str(level), _BEGIN) for cut in cuts), default=_BEGIN),
            )
            for level in range(LEVELS)
        ]
        self._go_on()

    def _go_on(self) -> None:
        """Find the rows of each level that the next one has not folded yet, by the files."""
        files = _Files(self._directory, self._header)
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


# -- means -------------------------------------------------------------------------------------------


def mean_of(rows: Sequence[Row]) -> Row:
    """Return one row for some that follow each other."""
    counts = [row.count for row in rows]
    return Row(
        rows[0].first,
        max(row.last for row in rows),
        sum(counts),
        _mean_of_dictionaries([row.record for row in rows], counts),
    )


def _mean_of_dictionaries(records: list[dict[str, Any]], counts: list[int]) -> dict[str, Any]:
    names = {name: None for record in records for name in record}
    return {
        name: _mean([record.get(name) for record in records], counts) for name in names
    }  # in the order in which they came


def _mean(values: list[Any], counts: list[int]) -> Any:
    kinds = set(map(type, values))
    if kinds <= _NUMBERS:
        return _rounded(sum(map(_times, values, counts)) / sum(counts))
    if type(None) in kinds:
        there = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None]
        return _mean([value for value, _ in there], [count for _, count in there]) if there else None
    if kinds == {dict}:
        return _mean_of_dictionaries(values, counts)
    if kinds == {list} and len({len(value) for value in values}) == 1:
        return _mean_of_lists(values, counts)
    return values[-1]


def _mean_of_lists(values: list[list[Any]], counts: list[int]) -> list[Any]:
    if len(set(counts)) == 1:
        num = len(counts)
        with contextlib.suppress(TypeError):  # the usual case: numbers, in quantities
            return [_rounded(sum(items) / num) for items in zip(*values, strict=True)]
    return [_mean(list(items), counts) for items in zip(*values, strict=True)]


_NUMBERS: Final = {int, float}


def _times(value: float, count: int) -> float:
    return value * count


def _rounded(value: float) -> float:
    return round(value, DIGITS) if abs(value) < 1e6 else round(value, 1)


# -- reading -----------------------------------------------------------------------------------------


def _path(directory: Path, level: int, number: int) -> Path:
    return directory / f"{level}-{number:06}.jsonl"


def _files(directory: Path, level: int) -> list[tuple[int, Path]]:
    found = []
    for path in directory.glob(f"{level}-*.jsonl"):
        with contextlib.suppress(ValueError):
            found.append((int(path.stem.partition("-")[2]), path))
    return sorted(found)


class _Files:
    """The files of a directory, as a reader sees them.

    Args:
        header: of the files that are read; None: that of the newest one.
    """

    def __init__(self, directory: Path, header: dict[str, Any] | None = None) -> None:
        self._directory = directory
        self.notes: list[str] = []
        self.header = header
        """None: there is none."""
        for _, path in reversed(_files(directory, 0)):
            if self.header is not None:
                break
            with contextlib.suppress(OSError), path.open("rb") as file:
                self.header = self._header_in(file.readline(), path)
        self.cuts: list[_Cut] = []
        with contextlib.suppress(OSError):
            for text in (directory / CUTS).read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    self.cuts.append(_cuts.decode(text))

    def rows(self, level: int, number: int, path: Path, end_bytes: int = sys.maxsize) -> list[Row]:
        """Return the rows of a file that were not taken back.

        Args:
            end_bytes: only those in the last so many bytes.
        """
        try:
            with path.open("rb") as file:
                head = file.readline()
                offset = file.seek(max(len(head), os.fstat(file.fileno()).st_size - end_bytes))
                if offset > len(head):
                    offset += len(file.readline())  # perhaps the rest of a line
                texts = file.read().split(b"\n")
        except FileNotFoundError:
            return []  # it was the oldest, and its writer has forgotten it
        except OSError as error:
            self.notes.append(f"{path} cannot be read: {error.strerror}")
            return []
        if not self._is_like_the_newest(head, path):
            return []
        rows: list[Row] = []
        offsets: list[int] = []
        num_broken = 0
        for number_of_line, text in enumerate(texts, 1):
            try:
                rows.append(_rows.decode(text))
                offsets.append(offset)
            except (msgspec.DecodeError, UnicodeDecodeError):  # half a line at the end is being written
                num_broken += text != b"" and number_of_line < len(texts)
            offset += len(text) + 1
        if num_broken:
            self.notes.append(f"{num_broken} of {len(texts) - 1} lines of {path} are broken and left out")
        highest = max((row.last for row in rows), default=-math.inf)
        for cut in self.cuts:
            if cut.key <= highest and number <= (before := cut.before.get(str(level), _BEGIN))[0]:
                end = bisect.bisect_left(offsets, before[1]) if number == before[0] else len(rows)
                kept = [at for at, row in enumerate(rows) if at >= end or row.last < cut.key]
                rows, offsets = [rows[at] for at in kept], [offsets[at] for at in kept]
        return rows

    def newest(self, level: int) -> list[Row]:
        """Return the newest rows of a level, at least so many as can wait for the next level, if there are so many."""
        found: list[Row] = []
        for number, path in reversed(_files(self._directory, level)):
            found = self.rows(level, number, path) + found
            if len(found) >= 2 * FOLD:
                break
        return sorted(found, key=_first)

    def first_row(self, path: Path) -> tuple[Row | None, float]:
        """Return the first row of a file, and about how many rows it has."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            if not self._is_like_the_newest(file.readline(), path):
                return None, 0.0
            begin = file.tell()
            data = file.read(HEAD_BYTES)
            if b"\n" not in data:
                data += file.readline()  # of very many workers
            texts = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            num_bytes = os.fstat(file.fileno()).st_size - begin
            for text in texts:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    return _rows.decode(text), num_bytes * len(texts) / sum(map(len, texts))
        return None, 0.0

    def last_key(self, path: Path, row: Row) -> float:
        """Return the last key of a file, whose first row is given."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            num_bytes = min(size, 1 << 16)
            while num_bytes > 0:
                for text in reversed(os.pread(file.fileno(), num_bytes, size - num_bytes).split(b"\n")):
                    with contextlib.suppress(msgspec.DecodeError):
                        return max(_rows.decode(text).last, row.last)
                num_bytes = min(size, 4 * num_bytes) if num_bytes < size else 0
        return row.last

    def _header_in(self, text: bytes, path: Path) -> dict[str, Any] | None:
        """Return the header of a file; None if it has none that can be read."""
        try:
            head = msgspec.json.decode(text)
            schema, header = int(head["schema"]), head["header"]
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            return None
        if schema > SCHEMA and not any("newer" in note for note in self.notes):
            self.notes.append(
                f"{path.parent} was written by a newer version (schema {schema}, this one knows {SCHEMA}); what this "
                "version does not know is left out"
            )
        return header if isinstance(header, dict) else None

    def _is_like_the_newest(self, text: bytes, path: Path) -> bool:
        """Return whether the records of a file, whose first line is given, can be put together with the newest."""
        header = self._header_in(text, path)
        if header is None or self.header is None or header == self.header:
            return True
        if not any("header" in note for note in self.notes):
            self.notes.append(
                f"{path} and perhaps others were written by another version: their header differs from that of the "
                "newest file, and they are left out"
            )
        return False


def _first(row: Row) -> float:
    return row.first


class _Span(NamedTuple):
    """The part of a level that one file has."""

    number: int
    path: Path
    first: float
    end: float
    """Where the next file begins; of the newest file: its last key."""
    num_rows: float


def read(directory: Path, first: float = -math.inf, last: float = math.inf, points: int = 1000) -> Reading:
    """Return at most about ``points`` rows for the keys from ``first`` to ``last``: the finest ones that are so few.

    Where the level of these rows has forgotten the oldest keys, coarser rows follow; what is newer than its last row,
    finer ones tell. Reads only the files that it needs. Never raises for what the files hold.
    """
    files = _Files(directory)
    levels = [_spans(directory, level, files) for level in range(LEVELS)]
    chosen = next(
        (level for level, spans in enumerate(levels) if spans and _estimate(spans, first, last) <= 1.5 * points),
        max((level for level, spans in enumerate(levels) if spans), default=0),
    )
    rows = list(_rows_between(levels[chosen], chosen, files, first, last))
    for level in range(chosen + 1, LEVELS):  # older
        end = rows[0].first if rows else math.inf
        if levels[level] and end > first:
            older = [
                row for row in _rows_between(levels[level], level, files, first, min(end, last)) if row.first < end
            ]
            covered = older[-1].last if older else -math.inf
            rows = older + [row for row in rows if row.first > covered]
    for level in range(chosen - 1, -1, -1):  # newer
        begin = rows[-1].last if rows else -math.inf
        if levels[level] and begin < last:
            found = _rows_between(levels[level], level, files, max(begin, first), last)
            rows += [row for row in found if row.first > begin]
    if len(rows) > 2 * points > 0:
        each = math.ceil(len(rows) / points)
        rows = [mean_of(rows[start : start + each]) for start in range(0, len(rows), each)]
    return Reading(files.header or {}, rows, files.notes)


def newest(directory: Path, most: int) -> Reading:
    """Return the newest records, at most so many, as they were added. Reads as little as that takes."""
    files = _Files(directory)
    found: list[Row] = []
    for number, path in reversed(_files(directory, 0)):
        rows = files.rows(0, number, path, END_BYTES)
        if len(found) + len(rows) < most:
            rows = files.rows(0, number, path)
        found = rows + found
        if len(found) >= most:
            break
    return Reading(files.header or {}, sorted(found, key=_first)[-most:], files.notes)


def _spans(directory: Path, level: int, files: _Files) -> list[_Span]:
    found: list[_Span] = []
    end = math.inf
    for number, path in reversed(_files(directory, level)):
        row, num_rows = files.first_row(path)
        if row is not None:
            end = end if found else files.last_key(path, row)
            found.append(_Span(number, path, row.first, end, num_rows))
            end = row.first
    return found[::-1]


def _estimate(spans: list[_Span], first: float, last: float) -> float:
    """Return about how many rows lie between two keys."""
    total = 0.0
    for span in spans:
        low, high = max(first, span.first), min(last, span.end)
        if high >= low:
            length = span.end - span.first
            total += span.num_rows * ((high - low) / length if length > 0 else 1.0)
    return total


def _rows_between(spans: list[_Span], level: int, files: _Files, first: float, last: float) -> Iterator[Row]:
    found: list[Row] = []
    for span in spans:
        if span.first <= last and span.end >= first:
            rows = files.rows(level, span.number, span.path)
            found += [row for row in rows if row.first <= last and row.last >= first]
    return iter(sorted(found, key=_first))
