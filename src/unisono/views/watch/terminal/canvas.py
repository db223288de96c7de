"""A picture at the bottom of a terminal, with lines that scroll by above it. Only what has changed is written.

The cursor stands in the line below the picture, so whatever ends this process leaves a usable terminal behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from unisono.views.watch.terminal.text import Line, stripped, to_ansi, width

__all__ = ["Canvas", "colours_wanted", "is_drawable", "shows_unicode", "size_of"]

_BEGIN: Final = "\x1b[?2026h\x1b[?7l"
"""What follows is shown at once, by terminals that know this; and a line that is too long is cut, not wrapped."""
_END: Final = "\x1b[?7h\x1b[?2026l"
_UP: Final = "\x1b[{}A\r"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_NEXT: Final = "\r\n"


class Canvas:
    """Returns what to write, and remembers what the terminal shows then.

    Args:
        colours: the terminal shows colours, and its user wants them.
    """

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours
        self._shown: list[str] = []
        self._widths: list[int] = []
        self._columns = 0

    def frame(self, above: Sequence[str], picture: Sequence[Line], columns: int) -> str:
        """Return what shows the lines above the picture, and then the picture; "" if nothing has changed.

        Args:
            above: with escape sequences of colours only.
            columns: of the terminal now. Where it has become narrower, the lines of before have been wrapped.
        """
        picture = [stripped(line) for line in picture]
        lines = [to_ansi(line, colours=self._colours) for line in picture]
        if not above and lines == self._shown and columns == self._columns:
            return ""
        parts = [_BEGIN]
        if self._shown:
            parts.append(_UP.format(self._height(columns)))
        known = self._shown if not above and columns == self._columns else []
        if above:
            parts += [_CLEAR_BELOW, "\x1b[?7h", *(text + _NEXT for text in above), "\x1b[?7l"]
        elif not known:
            parts.append(_CLEAR_BELOW)
        widths = [sum(width(text) for text, _ in line) for line in picture]
        for number, (text, wide) in enumerate(zip(lines, widths, strict=True)):
            is_shown = number < len(known) and known[number] == text
            # In the last column the cursor stays on the last character, which must not be cleared.
            parts.append(_NEXT if is_shown else text + (_CLEAR_LINE if wide < columns else "") + _NEXT)
        parts += [_CLEAR_BELOW, _END]
        self._shown, self._columns, self._widths = lines, columns, widths
        return "".join(parts)

    def forget(self) -> None:
        """Take the picture for text like any other: something else has been written below it."""
        self._shown, self._widths = [], []

    def _height(self, columns: int) -> int:
        """Return how many rows the picture has now."""
        return sum(max(1, -(-each // max(1, columns))) for each in self._widths)


def is_drawable(environment: dict[str, str]) -> bool:
    """Return whether a terminal can move its cursor."""
    return environment.get("TERM", "") not in ("", "dumb", "unknown")


def colours_wanted(environment: dict[str, str]) -> bool:
    """Return whether a terminal is to show colours: https://no-color.org."""
    return not environment.get("NO_COLOR") and is_drawable(environment)


def shows_unicode(environment: dict[str, str], encoding: str) -> bool:
    """Return whether a terminal shows more than ASCII, by the locale and the encoding of standard output.

    Python replaces the locale C by C.UTF-8 in ``LC_CTYPE``, so that one says nothing.
    """
    if encoding.lower().replace("-", "") != "utf8":
        return False
    given = [environment.get("LC_ALL", ""), environment.get("LC_CTYPE", ""), environment.get("LANG", "")]
    if given[1] == "C.UTF-8" and given[2]:
        given[1] = ""
    locale = next(filter(None, given), "")
    return not locale or "utf8" in locale.lower().replace("-", "")


def size_of(descriptor: int) -> tuple[int, int]:
    """Return columns and rows of a terminal."""
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24
