"""The newest records of something that goes on for ever, whole. Older ones are dropped, a file at a time.

``NAME.jsonl`` gets a line for each record. When it has `MOST_RECORDS` lines, or `MOST_BYTES`, it becomes
``NAME.before.jsonl`` in the place of the one that had this name, and the next record begins a new file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from unisono.record.journal.file import backwards
from unisono.system.owned import open_regular

__all__ = ["MOST_BYTES", "MOST_RECORDS", "Newest", "earlier", "newest_first"]

MOST_RECORDS: Final = 4_000
"""So many of the newest records are kept in any case, and at most twice as many ..."""
MOST_BYTES: Final = 16 << 20
"""... unless so many bytes are fewer records."""


class Newest:
    """Appends records, as the only process that does.

    Args:
        path: of the file; its directory exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_records = -1
        """In the file; -1: not known."""

    def add(self, records: Sequence[bytes]) -> None:
        """Append records: JSON, without a newline.

        Raises:
            OSError: the file cannot be written.
        """
        data = b"".join(record + b"\n" for record in records)
        known, self._num_records = self._num_records, -1
        if known < 0:
            found = self._path.read_bytes() if self._path.exists() else b""
            known = found.count(b"\n")
            if found and not found.endswith(b"\n"):  # a writer was killed, or the disk was full
                data = b"\n" + data
        with contextlib.suppress(FileNotFoundError):
            if known >= MOST_RECORDS or (known and self._path.stat().st_size + len(data) > MOST_BYTES):
                self._path.replace(earlier(self._path))
                known = 0
        with self._path.open("ab", buffering=0) as file:
            if os.write(file.fileno(), data) < len(data):
                raise OSError(f"{self._path} took only part of the data: the disk is full")
        self._num_records = known + len(records)


def earlier(path: Path) -> Path:
    """Return the path of the file with the records before those of ``path``."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


def newest_first(path: Path) -> Iterator[bytes]:
    """Yield the records, the last one first. Reads no more of the files than is asked for.

    Raises:
        OSError: a file cannot be read, other than because it is not there.
    """
    for each in (path, earlier(path)):
        with contextlib.suppress(FileNotFoundError), open_regular(each) as file:
            for _, text in backwards(file):
                if text.endswith(b"\n"):
                    yield text
