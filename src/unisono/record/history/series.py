"""A series of numbers by step, in few points that keep the extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unisono.record.history.index import Block

__all__ = ["Series"]


class Series:
    """Points of one series of numbers, each of one step or more: `told` gives them as a view gets them."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float, Any, Any, Any]] = []

    def add(self, step: int, time: float, values: list[float], mean: float | None = None) -> None:
        """Add the point of some values, at least one."""
        total = sum(values)
        if math.isfinite(total):
            self._points.append((step, time, min(values), max(values), total / len(values) if mean is None else mean))
            return
        finite = [value for value in values if math.isfinite(value)]
        odd = (sum(map(math.isnan, values)), values.count(math.inf), values.count(-math.inf))
        self._add(step, time, (min(finite), max(finite)) if finite else None, _mean(finite), odd)

    def add_blocks(self, name: str, blocks: Sequence[Block]) -> None:
        """Add the point of the values in some blocks, if there are any."""
        there = [block.values[name] for block in blocks if name in block.values]
        finite = [each for each in there if each[3]]
        odds = [block.odd[name] for block in blocks if name in block.odd]
        if not finite and not odds:
            return
        odd = (sum(each[0] for each in odds), sum(each[1] for each in odds), sum(each[2] for each in odds))
        extremes = (min(each[0] for each in finite), max(each[1] for each in finite)) if finite else None
        number = sum(each[3] for each in finite)
        mean = sum(each[2] for each in finite) / number if number else 0.0
        if name == "samples_per_s":
            seconds = sum(block.values["step_s"][2] for block in blocks if "step_s" in block.values)
            samples = sum(block.values["samples"][2] for block in blocks if "samples" in block.values)
            mean = samples / seconds if seconds else mean
        first = next(block for block in blocks if name in block.values)
        self._add(first.first, first.since, extremes, mean, odd)

    def _add(
        self, step: int, time: float, extremes: tuple[float, float] | None, mean: float, odd: tuple[int, int, int]
    ) -> None:
        num_nan, num_high, num_low = odd
        low: Any = "-inf" if num_low else extremes[0] if extremes else "inf" if num_high else "nan"
        high: Any = "inf" if num_high else extremes[1] if extremes else "-inf" if num_low else "nan"
        told: Any = mean
        if num_nan or (num_high and num_low):
            told = "nan"
        elif num_high or num_low:
            told = "inf" if num_high else "-inf"
        self._points.append((step, time, low, high, told))

    def told(self) -> dict[str, list[Any]]:
        """Return the points by column: ``step``, ``time``, ``low``, ``high`` and ``mean``."""
        steps, times, lows, highs, means = map(list, zip(*self._points, strict=True)) if self._points else ([],) * 5
        return {"step": steps, "time": times, "low": lows, "high": highs, "mean": means}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
