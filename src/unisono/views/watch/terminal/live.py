"""Live view of a run in a terminal: a picture at the bottom, everything that workers and machines say above it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from unisono.core.events import Event, RunEnded, RunStarted, StepFinished, WorkerOutput
from unisono.core.words import harmless
from unisono.system.process import tell
from unisono.views.watch.terminal.base import Terminal, summary
from unisono.views.watch.terminal.canvas import colours_wanted, shows_unicode
from unisono.views.watch.terminal.drawing import draw, in_short
from unisono.views.watch.terminal.screen import Screen, rows_beside_output
from unisono.views.watch.terminal.text import Line, plain, to_ansi

__all__ = ["Live"]

_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red")
_RESET: Final = "\x1b[0m"


class Live(Terminal):
    """A picture of the run (`unisono.views.watch.terminal.drawing`), drawn once a second.

    It is shown from the first event of the training on; before, and for scripts that make no `unisono.Run`, there are
    lines only.
    """

    def __init__(self) -> None:
        super().__init__(time.time)
        environment = dict(os.environ)
        self._colours = colours_wanted(environment)
        self._unicode = shows_unicode(environment, sys.stdout.encoding)
        self._is_error_shared = sys.stderr.isatty()
        self._screen = Screen(
            sys.stdout.fileno(),
            sys.stdout.encoding,
            self._picture,
            colours=self._colours,
            share=rows_beside_output,
        )

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepFinished):
            self._screen.show()
        super().emit(event)

    def close(self) -> None:
        self._screen.close()

    def _picture(self, columns: int, rows: int) -> tuple[Sequence[Line], str]:
        overview = self._overview()
        return draw(overview, columns, rows, unicode=self._unicode), f"unisono: {plain([in_short(overview)])}"

    def _output(self, line: WorkerOutput) -> None:
        if line.is_error and not self._is_error_shared:
            tell(f"[{line.source}] {line.text}")
            return
        digits = line.source.removeprefix("w")
        colour = _COLOURS[int(digits) % len(_COLOURS)] if digits.isdecimal() else ""
        text = harmless(line.text, keeps_colours=self._colours)
        reset = _RESET if "\x1b" in text else ""  # what ends the colours that the line has set
        self._screen.put(self._styled([(f"[{harmless(line.source)}] ", colour), (text, "")]) + reset)

    def _say(self, text: str) -> None:
        for line in text.splitlines():
            self._screen.put(self._styled([(f"unisono: {harmless(line)}", "dim")]))

    def _styled(self, line: Line) -> str:
        return to_ansi(line, colours=self._colours)

    def _step(self) -> None:
        """The picture shows it."""

    def _end(self, ended: RunEnded) -> None:
        style = "good" if ended.ok else "error"
        is_apart = bool(ended.traceback) and not self._is_error_shared
        shown = "" if is_apart else ended.traceback
        lines = [
            self._styled([(harmless(line), style)]) for line in summary(self._overview(), ended, shown).splitlines()
        ]
        lines += [harmless(line) for line in shown.splitlines()]
        self._screen.close(*lines)
        if is_apart:
            tell(ended.traceback.rstrip("\n"))
