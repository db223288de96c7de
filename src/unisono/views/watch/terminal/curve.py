"""Loss curve of characters: dots of braille, or asterisks where the terminal has no others."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from unisono.core.words import number
from unisono.record.overview import CurvePoint
from unisono.views.watch.terminal.text import Line, filled

__all__ = ["draw_curve"]

LABEL: Final = 9
"""Columns of the numbers at the left."""
_LOG_FROM: Final = 30.0
"""If the highest loss is so many times the lowest one, the axis is logarithmic."""
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Of a character of braille, by column and row."""


def draw_curve(
    points: Sequence[CurvePoint], columns: int, rows: int, *, last: int = -1, unicode: bool = True
) -> list[Line]:
    """Return so many rows and one for the axis, at most so many columns wide.

    Of the steps that share a column of dots, the lowest and the highest loss are shown, and all between.

    Args:
        rows: at least 2.
        last: number of the last step; -1: that of the last point.
    """
    wide = columns - LABEL - 1
    low = min((point.low for point in points), default=0.0)
    high = max((point.high for point in points), default=1.0)
    is_log = low > 0 and high / low >= _LOG_FROM
    shown = math.log if is_log else float
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
        is_log, shown = False, float
    per_column, per_row = (2, 4) if unicode else (1, 1)
    bands = _bands(points, wide * per_column, rows * per_row, low, high, shown)
    cells = _cells(bands, wide, rows, unicode=unicode)
    bar = "│" if unicode else "|"
    labels = [""] * rows
    if points:
        labels[0], labels[-1] = number(high), number(low)
        if rows >= 6:
            middle = (rows - 1) / 2
            at = 1 - middle / (rows - 1)
            value = math.exp(_between(math.log(low), math.log(high), at)) if is_log else _between(low, high, at)
            labels[round(middle)] = number(value)
    lines: list[Line] = [
        [(filled(label, LABEL, right=True), "dim"), (bar, "dim"), *row]
        for label, row in zip(labels, cells, strict=True)
    ]
    return [*lines, _axis(points, columns, last, is_log=is_log, unicode=unicode)]


def _axis(points: Sequence[CurvePoint], columns: int, until: int, *, is_log: bool, unicode: bool) -> Line:
    corner, line = ("└", "─") if unicode else ("+", "-")
    wide = columns - LABEL - 1
    first = f" step {points[0].step:,} " if points else ""
    last = f" {max(until, points[-1].step):,} " if len(points) > 1 else ""
    name = " loss, logarithmic " if is_log else " loss "
    room = wide - len(first) - len(last)
    if room < len(name) + 2:
        name = ""
    room -= len(name)
    if room < 1:
        return [(" " * LABEL + corner + line * wide, "dim")]
    left = room // 2
    return [(" " * LABEL + corner + first + line * left + name + line * (room - left) + last.rstrip(), "dim")]


def _between(low: float, high: float, at: float) -> float:
    return low * (1 - at) + high * at


class _Band(NamedTuple):
    """What is drawn in a column of dots, in rows counted from below."""

    low: float
    high: float
    mean: float


def _bands(
    points: Sequence[CurvePoint], wide: int, tall: int, low: float, high: float, shown: Callable[[float], float]
) -> list[_Band]:
    """Return the bands of the columns of dots, as far as there are any."""
    if not points:
        return []
    bottom, top = shown(low) / 2, shown(high) / 2  # halves: the range of two large numbers is a number
    span = (top - bottom) or 1.0  # of two tiny numbers, and of the logarithms of two large ones, it may be zero

    def row(value: float) -> float:
        return min(tall - 1.0, max(0.0, (shown(value) / 2 - bottom) / span * (tall - 1)))

    first, last = points[0].step, points[-1].step
    own: dict[int, list[CurvePoint]] = {}
    for point in points:
        column = (point.step - first) * (wide - 1) // (last - first) if last > first else 0
        own.setdefault(column, []).append(point)
    bands: list[_Band] = []
    for column, found in own.items():
        end = _Band(
            row(min(point.low for point in found)),
            row(max(point.high for point in found)),
            row(sum(point.mean / len(found) for point in found)),
        )
        start, before = (bands[-1], len(bands) - 1) if bands else (end, 0)
        for between in range(before + 1, column):  # no point: the band that joins those beside it
            at = (between - before) / (column - before)
            bands.append(_Band(*(_between(one, other, at) for one, other in zip(start, end, strict=True))))
        bands.append(end)
    return bands


def _cells(bands: Sequence[_Band], wide: int, rows: int, *, unicode: bool) -> list[Line]:
    """Return the rows of characters, the highest first.

    The mean is a line without holes, and the rest of the band is lighter: every other dot, or a character of its own.
    """
    across, down = (2, 4) if unicode else (1, 1)
    tall = rows * down
    dots = [[0] * wide for _ in range(rows)]
    means = set()
    before = -1
    for column, band in enumerate(bands):
        low, high, mean = round(band.low), round(band.high), round(band.mean)
        line = range(min(mean, before + 1), max(mean, before - 1) + 1) if before >= 0 else range(mean, mean + 1)
        means |= {((tall - 1 - dot) // down, column // across) for dot in line}
        shade = (dot for dot in range(low, high + 1) if not unicode or dot in (low, high) or (dot + column) % 2)
        for dot in (*line, *shade):
            row, part = divmod(tall - 1 - dot, down)
            dots[row][column // across] |= _DOTS[column % across][part]
        before = mean
    lines: list[Line] = []
    for row, cells in enumerate(dots):
        is_mean = [(row, column) in means for column in range(wide)]
        texts = [_character(cell, bright, unicode=unicode) for cell, bright in zip(cells, is_mean, strict=True)]
        lines.append(
            [
                ("".join(text for text, _ in found), "cyan" if bright else "dim")
                for bright, found in groupby(zip(texts, is_mean, strict=True), key=operator.itemgetter(1))
            ]
        )
    return lines


def _character(cell: int, is_mean: bool, *, unicode: bool) -> str:
    if not cell:
        return " "
    return chr(0x2800 + cell) if unicode else "*" if is_mean else ":"
