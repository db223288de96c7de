"""The journal's file: read it from its beginning or its end, cut it off, and end it for members that are gone."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from unisono.core.events import RunEnded
from unisono.record.journal import chain
from unisono.record.journal.lines import Line, LineEvent, from_line, parse, to_line
from unisono.system.owned import open_regular

__all__ = [
    "BLOCK_BYTES",
    "INDEX",
    "JOURNAL",
    "backwards",
    "conclude",
    "end_of",
    "events",
    "has_steps",
    "lines_from",
    "read",
    "tail",
    "truncate",
]

JOURNAL: Final = "journal.jsonl"
INDEX: Final = "journal.index"
"""What readers have found in the journal (`unisono.record.history.index`), so that the next one finds it faster."""
BLOCK_BYTES: Final = 1 << 16
MOST_LINE_BYTES: Final = 64 << 20


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a journal (a file, or the directory of its run). A torn last line is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is broken.
    """
    path = path / JOURNAL if path.is_dir() else path.resolve()
    with open_regular(path) as file:
        for number, text in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), b""), 1):
            if not text.endswith(b"\n"):
                if len(text) == MOST_LINE_BYTES:
                    raise ValueError(f"line {number} of {path} has more than {MOST_LINE_BYTES >> 20} MiB")
                return
            yield parse(path, text, f"line {number}")


def events(path: Path) -> Iterator[LineEvent]:
    """Yield the events of a journal, also of one that an older version has written.

    Raises:
        OSError, ValueError: as `read`.
    """
    for line in read(path):
        event = from_line(line)
        if event is not None:
            yield event


def backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, text) of each line from the last to the first. Reads no more of the file than is asked for.

    Raises:
        OSError: a line is too long for a journal.
    """
    start, text = file.seek(0, os.SEEK_END), b""
    while start > 0:
        if len(text) > MOST_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a line has more than {MOST_LINE_BYTES >> 20} MiB")
        num_bytes = min(start, max(BLOCK_BYTES, len(text)))
        start -= num_bytes
        file.seek(start)
        text = file.read(num_bytes) + text
        while (cut := text.rfind(b"\n", 0, -1) + 1) > 0:
            yield start + cut, text[cut:]
            text = text[:cut]
    if text:
        yield 0, text


def lines_from(path: Path, number: int) -> list[Line]:
    """Return the whole lines of a journal's file from this number on. Reads no more of the file than these.

    Raises:
        OSError, ValueError: as `read`.
    """
    found: list[Line] = []
    with open_regular(path) as file:
        for _, text in backwards(file):
            if not text.endswith(b"\n"):
                continue
            line = parse(path, text)
            if _number_of(line) < number:
                break
            found.append(line)
    return found[::-1]


def tail(path: Path, file: BinaryIO) -> tuple[int, Line | None, str]:
    """Return the end of the last whole line, the last line that can be read, and the error in the lines after it."""
    end, broken = 0, ""
    for offset, text in backwards(file):
        if not text.endswith(b"\n"):
            continue
        end = end or offset + len(text)
        try:
            line = parse(path, text)
            return end, {**line, "line": _number_of(line)}, broken
        except ValueError as error:
            broken = broken or str(error)
    return end, None, broken


def _number_of(line: Any) -> int:
    """Return the number of a line.

    Raises:
        ValueError: it has none.
    """
    try:
        return int(line["line"])
    except (KeyError, TypeError, OverflowError):
        raise ValueError("a line of the journal has no number") from None


def has_steps(directory: Path) -> bool:
    """Return whether the journal in ``directory`` has the line of a step; False if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return any(line["kind"] == "step" for line in read(directory / JOURNAL))
    return False


def truncate(path: Path, number: int) -> None:
    """Cut a journal after its first ``number`` lines: those that existed when a checkpoint was made."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        cut = _end_of(file, number)
        if cut < file.seek(0, os.SEEK_END):
            file.truncate(cut)
            os.fsync(file.fileno())


def end_of(path: Path, number: int) -> int:
    """Return the size of a journal's first ``number`` lines, in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _end_of(file, number)


def _end_of(file: BinaryIO, number: int) -> int:
    cut = file.seek(0, os.SEEK_END)
    for offset, text in backwards(file):
        try:
            is_kept = text.endswith(b"\n") and _number_of(json.loads(text)) < number
        except (ValueError, RecursionError):
            is_kept = False
        if is_kept:
            break
        cut = offset
    return cut


def conclude(directory: Path, reason: str) -> None:
    """Write the line about a failed run, after the end of all members.

    Does nothing if a member has written it, or if the journal is broken.

    Raises:
        OSError: the journal cannot be written.
    """
    path = directory / JOURNAL
    if not path.exists():
        return
    with path.open("r+b") as file:
        end, last, broken = tail(path, file)
        if broken or (last is not None and last["kind"] == "end"):
            return
        file.truncate(end)
        file.seek(end)
        number = last["line"] + 1 if last is not None else 0
        text, _ = chain.written(number, to_line(RunEnded(ok=False, reason=reason, digests={})), chain.value_in(last))
        file.write(f"{text}\n".encode())
