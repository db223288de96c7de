"""How many tokens a second a GPT trains: with the library alone, and in the plain loop that it replaces.

Sides take turns, each in a process of its own (`benchmarks.gpu.sides`), and are compared within a round: the clocks of
a GPU change with its temperature. All have the same kernels and switches.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from benchmarks.gpu.checks import ROOT, Check, OutOfTime, Place
from benchmarks.gpu.report import Result, shortened
from benchmarks.gpu.sides import WARM, Turn
from unisono.system.lifetime import started

__all__ = ["rate", "ratio", "speed"]

ROUNDS: Final = 5
GOAL: Final = 0.98

SIDES: Final = {
    "plain": "a plain loop",
    "plain deterministic": "a plain loop with deterministic kernels",
    "unisono": "the library alone, as it is by default (deterministic)",
    "unisono free": "the library alone, with deterministic=False",
}


def speed(place: Place) -> Check:
    """Return the measurement of all sides: their tokens a second, their memory, and the ratios."""
    return Check("speed", lambda: _speed(place))


def _speed(place: Place) -> Iterator[Result]:
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            sides = {name: stack.enter_context(_Side(place, name)) for name in SIDES}
            for side in sides.values():
                side.turn(WARM if place.is_large else 1)  # compiles; and the library compares states in its first steps
            number = ROUNDS if place.is_large else 2
            rounds = [{name: side.turn() for name, side in sides.items()} for _ in range(number)]
    except _Failed as failed:
        yield Result("speed", "failed", time.monotonic() - began, str(failed))
        return
    for name, says in SIDES.items():
        yield rate(f"speed: {name}", [one[name] for one in rounds], says)
    seconds = time.monotonic() - began
    for name, above, below, goal in (
        ("the library's part", "unisono free", "plain", GOAL),
        ("the library's part, deterministic", "unisono", "plain deterministic", GOAL),
        ("what deterministic kernels leave", "plain deterministic", "plain", None),
    ):
        found = [one[above].tokens_per_s / one[below].tokens_per_s for one in rounds]
        yield ratio(f"speed: {name}", found, SIDES[below], goal if place.is_large else None, seconds)


def rate(name: str, turns: Sequence[Turn], says: str, each: str = "") -> Result:
    """Return the result of one side: its speed in the middle turn, its memory in the last one.

    Args:
        each: is said after the memory.
    """
    middle, peak = statistics.median(one.tokens_per_s for one in turns), turns[-1].peak_bytes
    memory = f", {peak / 2**20:,.0f} MiB{each}" if peak else ""
    figures = {"tokens_per_s": middle, "peak_bytes": float(peak)}
    return Result(name, "measured", words=f"{middle:,.0f} tokens/s{memory}: {says}", figures=figures)


def ratio(name: str, found: Sequence[float], beside: str, goal: float | None, seconds: float) -> Result:
    """Return the result of a speed divided by another one, round by round."""
    middle = statistics.median(found)
    said = f"{middle:.3f} of {beside} ({min(found):.3f} to {max(found):.3f})"
    return Result(name, "measured", seconds, said + (f"; goal {goal}" if goal else ""), {"ratio": middle}, goal)


class _Failed(Exception):
    """A side has ended."""


class _Side:
    """A process that trains a number of steps when it is told to."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        self._steps = 4 if place.is_large else 2

    def __enter__(self) -> _Side:
        command = [sys.executable, "-m", "benchmarks.gpu.sides", self._name, *self._place.words]
        with ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            self._process = stack.enter_context(
                started(
                    command, environment=os.environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=self._errors, text=True,
                )
            )  # fmt: skip
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def turn(self, steps: int = 0) -> Turn:
        """Do some steps.

        Raises:
            _Failed: with the side's output.
            OutOfTime: no time was left for them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit_s = self._place.left_s()
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{steps or self._steps}\n")
            self._process.stdin.flush()
        watch = threading.Timer(limit_s, self._process.kill)
        watch.daemon = True  # nobody waits for it at the end
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if line:
            return Turn(*json.loads(line))
        if limit_s < self._place.limit_s and self._process.wait() == -signal.SIGKILL:
            raise OutOfTime
        self._errors.seek(0)
        raise _Failed(f"{self._name} has ended, or took longer than {limit_s:g} s: {shortened(self._errors.read())}")
