"""The terminal: one progress line, every line of a worker's output with the worker's name, and announcements."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, TextIO

from unisono.events import Announcement, Event, Problem, RunEnded, StepFinished, WorkerOutput
from unisono.words import count, progress

__all__ = ["Plain", "Rich", "Terminal", "summary", "terminal"]

PLAIN_EVERY_S: Final = 2.0
BALANCE_EVERY_S: Final = 5.0
"""Least time between two sentences about the balance: with steps of milliseconds nothing else would be seen."""
_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red")


class _Pace:
    """Speed of the run, from the reported steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = self._samples = 0.0  # of a step; smoothed alike, so that a short last batch shows no slump
        self.started = clock()
        self.last: StepFinished | None = None
        self._first = 0

    def add(self, step: StepFinished) -> bool:
        """Count a step. Return False if it was counted before: after a loss, a step may be reported twice."""
        if self.last is None:
            self._first = step.step
        elif step.step <= self.last.step:
            return False
        weight = 1.0 if self.last is None else 0.1
        self._seconds += weight * (step.seconds.total() - self._seconds)
        self._samples += weight * (step.samples - self._samples)
        self.last = step
        return True

    def num_steps(self, last: int) -> int:
        """Return how many steps were finished, by their numbers: some may not have been reported here.

        Args:
            last: the number of the last one, where that is known; else -1.
        """
        return 0 if self.last is None else max(self.last.step, last) + 1 - self._first

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.started

    @property
    def samples_per_second(self) -> float:
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    @property
    def left_s(self) -> float:
        if self.last is None or not self.last.num_steps:
            return 0.0
        return max(0.0, (self.last.num_steps - self.last.step - 1) * self._seconds)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(pace: _Pace, ended: RunEnded) -> str:
    """Return the run in one line."""
    if not ended.ok:
        return f"failed: {ended.reason}"
    last = pace.last
    if last is None:
        without = ", without a step" if ended.reason == "finished" else ""  # of a script that makes no `unisono.Run`
        return f"{ended.reason} after {pace.elapsed_s:.1f} s{without}"
    done = "finished" if ended.reason == "finished" else f"finished ({ended.reason})"
    steps = count(pace.num_steps(ended.step), "step")
    return f"{done}: {steps} in {pace.elapsed_s:.1f} s on {count(len(last.workers), 'worker')}"


class Terminal(ABC):
    """A sink that shows an agent's stream of events. Complete: `Plain` for files and pipes, `Rich` for a terminal."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pace = _Pace(clock)
        self._balance_at = -math.inf

    def emit(self, event: Event) -> None:
        match event:
            case WorkerOutput():
                self._output(event)
            case Announcement():
                self._say(event.text)
            case Problem():
                self._say(problem_words(event))
            case StepFinished():
                if self._pace.add(event):
                    self._say_balance(event.balance)
                    self._step(event)
            case RunEnded():
                self._end(event)

    def _say_balance(self, text: str) -> None:
        now = self._clock()
        if text and now - self._balance_at > BALANCE_EVERY_S:
            self._balance_at = now
            self._say(text)

    def _left(self, last: StepFinished) -> str:
        return "" if last.first_step else f"{_duration(self._pace.left_s)} left"

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _output(self, line: WorkerOutput) -> None: ...

    @abstractmethod
    def _say(self, text: str) -> None: ...

    @abstractmethod
    def _step(self, step: StepFinished) -> None: ...

    @abstractmethod
    def _end(self, ended: RunEnded) -> None: ...


def problem_words(event: Problem) -> str:
    """Return what to show of a problem. Where the run ends with it, the end says what has happened."""
    where = f"evidence, for a bug report: {event.evidence} in the run's directory" if event.evidence else ""
    if event.ends_run:
        return where or event.text
    return f"{event.text}. {where[:1].upper()}{where[1:]}" if where else event.text


def _done(step: StepFinished) -> str:
    """Return how far the run is. A script that has called ``run.steps`` before may do so for each of its epochs, so
    nobody knows how many steps there will be.
    """
    if not step.first_step:
        return progress(step.step + 1, step.num_steps)
    within = progress(step.step + 1 - step.first_step, step.num_steps - step.first_step)
    return f"epoch {step.epoch}: {within}"


class Plain(Terminal):
    """Lines, for files and pipes: a step at most every `PLAIN_EVERY_S`, and the last one."""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._shown_at = -PLAIN_EVERY_S
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
            self._write(self._err, f"unisono: {line}")

    def _step(self, step: StepFinished) -> None:
        self._is_shown = False
        if self._clock() - self._shown_at >= PLAIN_EVERY_S:
            self._show()

    def _end(self, ended: RunEnded) -> None:
        if not self._is_shown:
            self._show()
        self._write(self._out if ended.ok else self._err, f"unisono: {summary(self._pace, ended)}")
        if ended.traceback:
            self._write(self._err, ended.traceback.rstrip("\n"))

    def _show(self) -> None:
        last = self._pace.last
        if last is None:
            return
        self._shown_at = self._clock()
        self._is_shown = True
        parts = (
            _done(last),
            f"loss {last.loss:.4f}",
            f"{self._pace.samples_per_second:,.0f} samples/s",
            self._left(last),
            count(len(last.workers), "worker"),
        )
        self._write(self._out, f"unisono: {'  '.join(filter(None, parts))}")

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
                self._write(self._err, f"unisono: standard output cannot be written: {error}; the run goes on")


def _turn_off(stream: TextIO) -> None:
    """Discard everything that is written to a stream, also its buffered output when the process exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class Rich(Terminal):
    """A progress line at the bottom of a terminal, everything else above it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(clock)
        self._console = Console(highlight=False, soft_wrap=True)
        self._is_error_shared = sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.fields[done]}"),
            BarColumn(bar_width=30),
            TextColumn(
                "loss {task.fields[loss]}  {task.fields[rate]} samples/s  {task.fields[left]}{task.fields[workers]}"
            ),
            console=self._console,
            refresh_per_second=8,
        )
        self._task: Any = None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._progress.stop()

    def _output(self, line: WorkerOutput) -> None:
        from rich.text import Text

        if line.is_error and not self._is_error_shared:
            with contextlib.suppress(OSError):
                print(f"[{line.source}] {line.text}", file=sys.stderr, flush=True)
            return
        digits = line.source.removeprefix("w")
        colour = _COLOURS[int(digits) % len(_COLOURS)] if digits.isdecimal() else "white"
        self._print(Text.assemble((f"[{line.source}] ", colour), Text.from_ansi(line.text)))

    def _say(self, text: str) -> None:
        from rich.text import Text

        for line in text.splitlines():
            self._print(Text(f"unisono: {line}", style="dim"))

    def _step(self, step: StepFinished) -> None:
        fields: dict[str, Any] = {
            "done": _done(step),
            "loss": f"{step.loss:.4f}",
            "rate": f"{self._pace.samples_per_second:,.0f}",
            "left": f"{self._left(step)}  ".lstrip(),
            "workers": count(len(step.workers), "worker"),
        }
        total = step.num_steps or None
        with contextlib.suppress(OSError):  # the terminal is gone
            if self._task is None:
                self._task = self._progress.add_task("", total=total, completed=step.step + 1, **fields)
                self._progress.start()
            else:
                self._progress.update(self._task, total=total, completed=step.step + 1, **fields)

    def _end(self, ended: RunEnded) -> None:
        from rich.text import Text

        with contextlib.suppress(OSError):
            self._progress.stop()
        self._print(Text(summary(self._pace, ended), style="green" if ended.ok else "bold red"))
        if ended.traceback:
            with contextlib.suppress(OSError):
                print(ended.traceback.rstrip("\n"), file=sys.stderr, flush=True)

    def _print(self, text: Any) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text)


def terminal() -> Terminal:
    """Make the sink that suits standard output: `Rich` for a terminal, else `Plain`."""
    return Rich() if sys.stdout.isatty() else Plain()
