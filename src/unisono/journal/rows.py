"""A record, and the mean of several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

__all__ = ["Row", "first_key", "mean_of"]

DIGITS: Final = 6


class Row(msgspec.Struct, frozen=True):
    """A record, or the mean of several that follow each other."""

    first: float
    """Key of the first record in it."""
    last: float
    count: int
    """Number of records in it."""
    record: dict[str, Any]


def first_key(row: Row) -> float:
    """Return what rows are sorted by."""
    return row.first


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
