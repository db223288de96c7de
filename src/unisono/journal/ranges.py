"""Thinned records of a range of keys, in as many rows as somebody wants to see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from unisono.journal.levels import LEVELS, Files, files_of
from unisono.journal.rows import Row, first_key, mean_of

__all__ = ["Reading", "newest", "read"]

END_BYTES: Final = 1 << 16
"""So much of a file is read for its newest rows, unless more are asked for."""


class Reading(NamedTuple):
    """What a directory has for a range of keys."""

    header: dict[str, Any]
    """As it was given to `unisono.journal.thinning.Thinned`; empty if there is nothing."""
    rows: list[Row]
    """By key."""
    notes: list[str]
    """What could not be read, in words."""


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
    files = Files(directory)
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
    files = Files(directory)
    found: list[Row] = []
    for number, path in reversed(files_of(directory, 0)):
        rows = files.rows(0, number, path, END_BYTES)
        if len(found) + len(rows) < most:
            rows = files.rows(0, number, path)
        found = rows + found
        if len(found) >= most:
            break
    return Reading(files.header or {}, sorted(found, key=first_key)[-most:], files.notes)


def _spans(directory: Path, level: int, files: Files) -> list[_Span]:
    found: list[_Span] = []
    end = math.inf
    for number, path in reversed(files_of(directory, level)):
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


def _rows_between(spans: list[_Span], level: int, files: Files, first: float, last: float) -> Iterator[Row]:
    found: list[Row] = []
    for span in spans:
        if span.first <= last and span.end >= first:
            rows = files.rows(level, span.number, span.path)
            found += [row for row in rows if row.first <= last and row.last >= first]
    return iter(sorted(found, key=first_key))
