"""A run in a whole terminal, with keys: `unisono watch`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from unisono.record.overview import Overview
from unisono.views.watch.terminal.canvas import colours_wanted, shows_unicode
from unisono.views.watch.terminal.drawing import draw, in_short
from unisono.views.watch.terminal.keys import Keyboard
from unisono.views.watch.terminal.screen import Screen, rows_beside_output
from unisono.views.watch.terminal.screens import Looked, draw_page, turned
from unisono.views.watch.terminal.text import Line, plain

__all__ = ["Viewer"]

KEYS_EVERY_S: Final = 0.5


class Viewer:
    """Shows what it is given, until the run is over or the user quits. A context: it takes the terminal."""

    def __init__(self) -> None:
        self._unicode = shows_unicode(dict(os.environ), sys.stdout.encoding)
        self._overview: Overview | None = None
        self._note = ""
        self._looked = Looked()
        self._rows = 0
        self._is_over = self._has_left = False
        self._error: BaseException | None = None
        self._keys = Keyboard(_keyboard())
        self._screen: Screen | None = None

    def __enter__(self) -> Viewer:
        self._keys.__enter__()
        self._screen = Screen(
            sys.stdout.fileno(),
            sys.stdout.encoding,
            self._picture,
            colours=colours_wanted(dict(os.environ)),
            share=lambda rows: rows - 1,
        )
        self._screen.show()
        self._screen.refresh()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_left = True
        if self._screen is not None:
            self._screen.close()
        self._keys.__exit__()

    def show(self, overview: Overview | None, note: str) -> None:
        """Show this from now on; None: what was there before, with another note."""
        self._overview, self._note = overview or self._overview, note

    def follow(self, seen: Iterable[tuple[Overview | None, str, bool]], *, stays: bool) -> Overview | None:
        """Show what comes, until the run is over or the user quits. Returns what was shown last.

        Args:
            seen: overviews, notes, and whether nothing more comes.
            stays: wait for the user to quit, also when nothing more comes.
        """
        self._is_over = False
        reader = threading.Thread(target=self._read, args=(seen,), name="watching", daemon=True)
        reader.start()
        while stays or not self._is_over:
            for key in self._keys.wait(KEYS_EVERY_S):
                if key in ("q", "Q", "\x04"):
                    return self._overview
                self._looked = turned(self._looked, key, self._rows)
                if self._screen is not None:
                    self._screen.refresh()
        if self._error is not None:
            raise self._error
        return self._overview

    def _read(self, seen: Iterable[tuple[Overview | None, str, bool]]) -> None:
        try:
            for overview, note, is_over in seen:
                self.show(overview, note)
                if is_over and overview is not None and overview.ended:
                    break
        except BaseException as error:
            self._error = error
        self._is_over = True

    def _picture(self, columns: int, rows: int) -> tuple[Sequence[Line], str]:
        self._rows = rows
        overview = self._overview or Overview()
        if self._has_left:  # what stays on the terminal
            return draw(overview, columns, rows_beside_output(rows), unicode=self._unicode), ""
        lines, self._looked = draw_page(overview, self._looked, self._note, columns, rows, unicode=self._unicode)
        return lines, f"unisono: {plain([in_short(overview)])}"


def _keyboard() -> int:
    """Return the descriptor of the terminal's keyboard, also where standard input is a file."""
    for name in ("/dev/stdin", "/dev/tty"):
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOCTTY)
            if os.isatty(descriptor):
                return descriptor
            os.close(descriptor)
    return -1
