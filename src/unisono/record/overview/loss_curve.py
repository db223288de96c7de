"""Loss of a whole run, however long, in few points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.record.overview.values import CURVE_POINTS, CurvePoint

__all__ = ["Curve"]


class Curve:
    """Loss of the whole run in at most `CURVE_POINTS` points of equally many steps each."""

    def __init__(self) -> None:
        self._width = 1
        """Steps in a point: a power of two. A point begins at a multiple of it."""
        self._points: list[_Point] = []
        self._end = -1
        """First step that is not in the last point any more."""

    def add(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            return
        if step < self._end:
            self._points[-1].add(loss)
            return
        self._points.append(_Point(step, loss, loss, loss, 1))
        while len(self._points) > CURVE_POINTS:
            self._width *= 2
            self._points = list(_merged(self._points, self._width))
        self._end = (self._points[-1].step // self._width + 1) * self._width

    def cut(self, step: int) -> None:
        """Forget the steps from this one on. A point in which it lies keeps what it has: it is done again, alike."""
        self._points = [point for point in self._points if point.step < step]
        last = self._points[-1].step if self._points else -1
        self._end = (last // self._width + 1) * self._width if self._points else -1
        if not self._points:
            self._width = 1

    def points(self) -> list[CurvePoint]:
        return [CurvePoint(point.step, point.low, point.high, point.sum / point.number) for point in self._points]


@dataclass(slots=True)
class _Point:
    step: int
    low: float
    high: float
    sum: float
    number: int

    def add(self, loss: float) -> None:
        if loss < self.low:
            self.low = loss
        if loss > self.high:
            self.high = loss
        self.sum += loss
        self.number += 1


def _merged(points: Iterable[_Point], width: int) -> Iterable[_Point]:
    """Give the points that points become when a point has ``width`` steps."""
    last: _Point | None = None
    for point in points:
        if last is not None and last.step // width == point.step // width:
            last.low, last.high = min(last.low, point.low), max(last.high, point.high)
            last.sum += point.sum
            last.number += point.number
            continue
        if last is not None:
            yield last
        last = point
    if last is not None:
        yield last
