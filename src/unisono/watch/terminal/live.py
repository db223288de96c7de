"""Live view of a run in a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from unisono.events import RunEnded, StepFinished, WorkerOutput
from unisono.watch.terminal.base import Terminal, done, summary
from unisono.words import count

__all__ = ["Rich"]

_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red")


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
            "done": done(step),
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
