"""The files of thinned records: the newest as they are, older ones as means of 8, 64, 512 ...

A directory of files ``LEVEL-NUMBER.jsonl``. Level 0 has the records themselves, level 1 means of 8 of them, level 2
means of 64, and so on. All levels are written at the same time (`unisono.journal.thinning`), and each forgets its
oldest file when it has grown too large: so the past gets coarser, and nothing is ever rewritten. The first line of a
file is a header; each other line is a `Row`.

``cuts.jsonl`` says where records were taken back: what follows begins at an earlier key again.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.journal.rows import Row, first_key

__all__ = ["BEGIN", "CUTS", "FOLD", "LEVELS", "SCHEMA", "Cut", "Files", "files_of", "path_of"]

FOLD: Final = 8
"""So many rows of a level become one row of the next."""
LEVELS: Final = 9
HEAD_BYTES: Final = 1 << 14
"""So much of a file is looked at for how long its rows are: the first step of a run has told less than the others."""
CUTS: Final = "cuts.jsonl"
SCHEMA: Final = 1
BEGIN: Final = (0, 0)
"""A place in a level: the number of a file, and the offset in it."""


class Cut(msgspec.Struct, frozen=True):
    """Records were taken back."""

    key: float
    before: dict[str, tuple[int, int]]
    """By level: rows before this place (the number of a file, and the offset in it) are taken back from ``key`` on."""


_rows: Final = msgspec.json.Decoder(Row)
_cuts: Final = msgspec.json.Decoder(Cut)


def path_of(directory: Path, level: int, number: int) -> Path:
    """Return the path of a file."""
    return directory / f"{level}-{number:06}.jsonl"


def files_of(directory: Path, level: int) -> list[tuple[int, Path]]:
    """Return the files of a level with their numbers, the oldest first."""
    found = []
    for path in directory.glob(f"{level}-*.jsonl"):
        with contextlib.suppress(ValueError):
            found.append((int(path.stem.partition("-")[2]), path))
    return sorted(found)


class Files:
    """The files of a directory, as a reader sees them.

    Args:
        header: of the files that are read; None: that of the newest one.
    """

    def __init__(self, directory: Path, header: dict[str, Any] | None = None) -> None:
        self._directory = directory
        self.notes: list[str] = []
        self.header = header
        """None: there is none."""
        for _, path in reversed(files_of(directory, 0)):
            if self.header is not None:
                break
            with contextlib.suppress(OSError), path.open("rb") as file:
                self.header = self._header_in(file.readline(), path)
        self.cuts: list[Cut] = []
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
            if cut.key <= highest and number <= (before := cut.before.get(str(level), BEGIN))[0]:
                end = bisect.bisect_left(offsets, before[1]) if number == before[0] else len(rows)
                kept = [at for at, row in enumerate(rows) if at >= end or row.last < cut.key]
                rows, offsets = [rows[at] for at in kept], [offsets[at] for at in kept]
        return rows

    def newest(self, level: int) -> list[Row]:
        """Return the newest rows of a level, at least so many as can wait for the next level, if there are so many."""
        found: list[Row] = []
        for number, path in reversed(files_of(self._directory, level)):
            found = self.rows(level, number, path) + found
            if len(found) >= 2 * FOLD:
                break
        return sorted(found, key=first_key)

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
