"""The run on the screen: one progress line, the workers' output told apart, and decisions with their reasons."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TextIO

from unisono.messages import Ended, StepDone
from unisono.words import count, progress

__all__ = ["Plain", "Rich", "Terminal", "summary", "terminal"]

PLAIN_EVERY_S: Final = 2.0
_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red")


class Terminal(Protocol):
    """Where an agent shows what happens. Complete: `Plain` for files and pipes, `Rich` for a terminal."""

    def worker_line(self, worker_id: str, text: str, *, is_error: bool) -> None:
        """One line of a worker's output."""

    def say(self, text: str) -> None:
        """A decision, with its reason."""

    def step(self, done: StepDone) -> None:
        """A step is committed."""

    def close(self, ended: Ended, *, with_traceback: bool = True) -> None:
        """The last thing that is shown."""


class _Pace:
    """How fast the run is, from the steps that were seen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = self._samples = 0.0  # of a step; smoothed alike, so that a short last batch shows no slump
        self.started = clock()
        self.last: StepDone | None = None
        self._first = 0

    def add(self, done: StepDone) -> bool:
        """Whether it is a new one: after a loss, a step may be told twice."""
        if self.last is None:
            self._first = done.step
        elif done.step <= self.last.step:
            return False
        weight = 1.0 if self.last is None else 0.1
        self._seconds += weight * (done.seconds - self._seconds)
        self._samples += weight * (done.samples - self._samples)
        self.last = done
        return True

    def num_steps(self, last: int) -> int:
        """How many steps were done, by their numbers: not all of them may have been told here.

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


def summary(pace: _Pace, ended: Ended) -> str:
    """The run in one line."""
    if not ended.ok:
        return f"failed: {ended.reason}"
    last = pace.last
    if last is None:
        return f"{ended.reason} in {pace.elapsed_s:.1f} s"
    done = "finished" if ended.reason == "finished" else f"finished ({ended.reason})"
    steps = count(pace.num_steps(ended.step), "step")
    return f"{done}: {steps} in {pace.elapsed_s:.1f} s on {count(last.num_workers, 'worker')}"


class Plain:
    """Lines, for files and pipes: a step at most every `PLAIN_EVERY_S`, and the last one."""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._clock = clock
        self._pace = _Pace(clock)
        self._shown_at = -PLAIN_EVERY_S
        self._is_shown = True
        self._failing: list[TextIO] = []
        """Streams whose last line could not be written."""

    def worker_line(self, worker_id: str, text: str, *, is_error: bool) -> None:
        self._write(self._err if is_error else self._out, f"[{worker_id}] {text}")

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self._write(self._err, f"unisono: {line}")

    def step(self, done: StepDone) -> None:
        if not self._pace.add(done):
            return
        self._is_shown = False
        if self._clock() - self._shown_at >= PLAIN_EVERY_S:
            self._show()

    def close(self, ended: Ended, *, with_traceback: bool = True) -> None:
        if not self._is_shown:
            self._show()
        self._write(self._out if ended.ok else self._err, f"unisono: {summary(self._pace, ended)}")
        if ended.traceback and with_traceback:
            self._write(self._err, ended.traceback.rstrip("\n"))
        for stream in self._failing:
            _turn_off(stream)

    def _show(self) -> None:
        last = self._pace.last
        if last is None:
            return
        self._shown_at = self._clock()
        self._is_shown = True
        parts = (
            progress(last.step + 1, last.num_steps),
            f"loss {last.loss:.4f}",
            f"{self._pace.samples_per_second:,.0f} samples/s",
            f"{_duration(self._pace.left_s)} left",
            count(last.num_workers, "worker"),
        )
        self._write(self._out, f"unisono: {'  '.join(parts)}")

    def _write(self, stream: TextIO, line: str) -> None:
        """Whatever becomes of the line, the training goes on."""
        was_failing = stream in self._failing
        if was_failing:
            self._failing.remove(stream)
        try:
            stream.write(line + "\n")
            stream.flush()
        except BrokenPipeError:  # whoever read it has gone
            _turn_off(stream)
        except OSError as error:  # a full disk: this line is lost, those after it perhaps not
            self._failing.append(stream)
            if not was_failing and stream is self._out:
                self._write(self._err, f"unisono: standard output cannot be written: {error}; the run goes on")


def _turn_off(stream: TextIO) -> None:
    """Nothing is written to it any more, nor what it still holds when the process exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class Rich:
    """A progress line at the bottom of a terminal, everything else above it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(highlight=False, soft_wrap=True)
        self._pace = _Pace(clock)
        self._is_error_shared = sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.fields[done]}"),
            BarColumn(bar_width=30),
            TextColumn(
                "loss {task.fields[loss]}  {task.fields[rate]} samples/s  {task.fields[left]} left  {task.fields[who]}"
            ),
            console=self._console,
            refresh_per_second=8,
        )
        self._task: Any = None

    def worker_line(self, worker_id: str, text: str, *, is_error: bool) -> None:
        from rich.text import Text

        if is_error and not self._is_error_shared:
            with contextlib.suppress(OSError):
                print(f"[{worker_id}] {text}", file=sys.stderr, flush=True)
            return
        digits = worker_id.removeprefix("w")
        colour = _COLOURS[int(digits) % len(_COLOURS)] if digits.isdecimal() else "white"
        self._print(Text.assemble((f"[{worker_id}] ", colour), Text.from_ansi(text)))

    def say(self, text: str) -> None:
        from rich.text import Text

        for line in text.splitlines():
            self._print(Text(f"unisono: {line}", style="dim"))

    def step(self, done: StepDone) -> None:
        if not self._pace.add(done):
            return
        fields: dict[str, Any] = {
            "done": progress(done.step + 1, done.num_steps),
            "loss": f"{done.loss:.4f}",
            "rate": f"{self._pace.samples_per_second:,.0f}",
            "left": _duration(self._pace.left_s),
            "who": count(done.num_workers, "worker"),
        }
        total = done.num_steps or None
        with contextlib.suppress(OSError):  # the terminal is gone
            if self._task is None:
                self._task = self._progress.add_task("", total=total, completed=done.step + 1, **fields)
                self._progress.start()
            else:
                self._progress.update(self._task, total=total, completed=done.step + 1, **fields)

    def close(self, ended: Ended, *, with_traceback: bool = True) -> None:
        from rich.text import Text

        with contextlib.suppress(OSError):
            self._progress.stop()
        self._print(Text(summary(self._pace, ended), style="green" if ended.ok else "bold red"))
        if ended.traceback and with_traceback:
            with contextlib.suppress(OSError):
                print(ended.traceback.rstrip("\n"), file=sys.stderr, flush=True)

    def _print(self, text: Any) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text)


def terminal() -> Terminal:
    """What suits where standard output goes."""
    return Rich() if sys.stdout.isatty() else Plain()
