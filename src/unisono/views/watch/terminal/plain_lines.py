"""Plain lines about a run, for files and pipes: of one that this command trains, and of one that is looked at."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

from unisono.core.events import RunEnded, WorkerOutput
from unisono.core.words import harmless
from unisono.record.overview import Overview, Recent
from unisono.views import date
from unisono.views.watch.terminal.base import Terminal, progress_line, summary

__all__ = ["WAITS_S", "Cadence", "OverviewLines", "PlainTerminal"]

WAITS_S: Final = (1, 2, 2, 5, 10, 10, 30, 60, 60, 120, 300, 600)
"""Seconds between two lines; the last of them from then on. A day has about 150 lines."""

_KNOWN: Final = 200
"""Sentences of a run that is looked at are told again with each overview: so many are known."""


class Cadence:
    """Says when the next progress line is due: often at first, then rarer and rarer, so days do not fill a disk."""

    def __init__(self) -> None:
        self._due = -math.inf
        self._num_lines = 0

    def is_due(self, now: float) -> bool:
        """Return whether a line is due."""
        return now >= self._due

    def said(self, now: float) -> None:
        """Note that a line was written because it was due."""
        self._due = now + WAITS_S[min(self._num_lines, len(WAITS_S) - 1)]
        self._num_lines += 1


class PlainTerminal(Terminal):
    """Lines, for files and pipes: steps in the rhythm of `Cadence`, the last one, and at once whatever else happens.

    Lines about the run begin with the date and the time. What workers print stays as it is: scripts may say the time
    themselves, and other programs may read it.

    Args:
        clock: seconds that only grow.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(wall)
        self._clock = clock
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._steps = Cadence()
        self._is_shown = True
        self._failing: list[TextIO] = []
        """Streams whose last line could not be written."""

    def close(self) -> None:
        for stream in self._failing:
            _turn_off(stream)

    def _output(self, line: WorkerOutput) -> None:
        self._write(self._err if line.is_error else self._out, f"[{line.source}] {line.text}")

    def _say(self, text: str) -> None:
        for line in text.splitlines():
            self._write(self._err, f"{self._time()} unisono: {line}")

    def _step(self) -> None:
        self._is_shown = False
        if self._steps.is_due(now := self._clock()):
            self._steps.said(now)
            self._show()

    def _end(self, ended: RunEnded) -> None:
        if not self._is_shown:
            self._show()
        self._write(
            self._out if ended.ok else self._err,
            f"{self._time()} unisono: {summary(self._overview(), ended, ended.traceback)}",
        )
        if ended.traceback:
            self._write(self._err, ended.traceback.rstrip("\n"))

    def _show(self) -> None:
        self._is_shown = True
        self._write(self._out, f"{self._time()} unisono: {progress_line(self._overview())}")

    def _time(self) -> str:
        return date(self._now())

    def _write(self, stream: TextIO, line: str) -> None:
        """Write a line. Errors are no reason to end the training."""
        was_failing = stream in self._failing
        if was_failing:
            self._failing.remove(stream)
        try:
            stream.write(line + "\n")
            stream.flush()
        except BrokenPipeError:  # the reader has gone
            _turn_off(stream)
        except OSError as error:  # a full disk: this line is lost, those after it perhaps not
            self._failing.append(stream)
            if not was_failing and stream is self._out:
                self._write(
                    self._err, f"{self._time()} unisono: standard output cannot be written: {error}; the run continues"
                )


def _turn_off(stream: TextIO) -> None:
    """Discard everything that is written to a stream, also its buffered output when the process exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class OverviewLines:
    """Lines about a run that is looked at: each sentence once, a new state at once, steps in the rhythm of `Cadence`.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, out: TextIO | None = None, now: Callable[[], float] = time.time) -> None:
        self._out = sys.stdout if out is None else out
        self._now = now
        self._steps = Cadence()
        self._known: deque[Recent] = deque(maxlen=_KNOWN)
        self._state = ("", -1)
        self._note = ""

    def take(self, overview: Overview) -> None:
        """Write what is new."""
        for each in overview.recent:
            if each not in self._known:
                self._known.append(each)
                self._write(each.time or self._now(), each.text)
        if overview.state != self._state[0]:
            self._tell(overview)
        elif overview.step != self._state[1] and self._steps.is_due(now := self._now()):
            self._steps.said(now)
            self._tell(overview)

    def note(self, text: str) -> None:
        """Write a sentence about the view, unless it was the last one."""
        begins = text.partition(";")[0]
        if begins != self._note:
            self._note = begins
            self._write(self._now(), text)

    def close(self, overview: Overview) -> None:
        """Write how the run stands at the end."""
        if (overview.state, overview.step) != self._state:
            self._tell(overview)

    def _tell(self, overview: Overview) -> None:
        self._state = (overview.state, overview.step)
        why = f"  ({overview.reason})" if overview.reason else ""
        self._write(self._now(), f"{overview.state}: {progress_line(overview)}{why}")

    def _write(self, at: float, text: str) -> None:
        self._out.write(f"{date(at)} unisono: {harmless(text.partition(chr(10))[0])}\n")
        self._out.flush()
