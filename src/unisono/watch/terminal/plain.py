"""Plain lines about a run, for files and pipes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from unisono.events import RunEnded, StepFinished, WorkerOutput
from unisono.watch.cadence import Cadence
from unisono.watch.terminal.base import Terminal, done, on_workers, summary
from unisono.watch.terminal.text import number

__all__ = ["Plain"]


class Plain(Terminal):
    """Lines, for files and pipes: steps in the rhythm of `Cadence`, the last one, and at once whatever else happens.

    Lines about the run begin with the date and the time. What workers print stays as it is: scripts may say the time
    themselves, and other programs may read it.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(clock)
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._wall = wall
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
            self._write(self._err, f"{self._now()} unisono: {line}")

    def _step(self, step: StepFinished) -> None:
        self._is_shown = False
        if self._steps.is_due(now := self._clock()):
            self._steps.said(now)
            self._show()

    def _end(self, ended: RunEnded) -> None:
        if not self._is_shown:
            self._show()
        self._write(
            self._out if ended.ok else self._err,
            f"{self._now()} unisono: {summary(self._pace, ended, ended.traceback)}",
        )
        if ended.traceback:
            self._write(self._err, ended.traceback.rstrip("\n"))

    def _show(self) -> None:
        last = self._pace.last
        if last is None:
            return
        self._is_shown = True
        parts = (
            done(last),
            f"loss {number(last.loss)}",
            f"{self._pace.samples_per_second:,.0f} samples/s",
            self._left(last),
            on_workers(last),
        )
        self._write(self._out, f"{self._now()} unisono: {'  '.join(filter(None, parts))}")

    def _now(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._wall()))

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
                    self._err, f"{self._now()} unisono: standard output cannot be written: {error}; the run goes on"
                )


def _turn_off(stream: TextIO) -> None:
    """Discard everything that is written to a stream, also its buffered output when the process exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
