"""Styled text for a terminal: what it is made of, how wide it is, and how it is written.

Everything that comes from outside (names, output of workers, words of another machine) goes through
`unisono.core.words.harmless` before it is written: a terminal obeys control characters.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence
from typing import Final

__all__ = [
    "STYLES",
    "Line",
    "Span",
    "cut",
    "filled",
    "plain",
    "stripped",
    "time_of_day",
    "to_ansi",
    "width",
]

Span = tuple[str, str]
"""Text, and the name of its style in `STYLES`."""
Line = list[Span]

STYLES: Final = {
    "": "",
    "dim": "2",
    "bold": "1",
    "good": "32",
    "warning": "33",
    "error": "1;31",
    "cyan": "36",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "blue": "34",
    "red": "31",
}
"""Neither black nor white, which some terminals have as their background."""


def width(text: str) -> int:
    """Return how many columns a text without control characters takes."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int, more: str = "…") -> str:
    """Return what fits into so many columns; ``more`` stands at the end of what is not complete."""
    if width(text) <= columns:
        return text
    room = columns - len(more)
    if room < 0:
        return more[:columns]
    kept = []
    for character in text:
        room -= _width(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + more


def filled(text: str, columns: int, *, right: bool = False) -> str:
    """Return a text that takes exactly so many columns."""
    text = cut(text, columns)
    room = " " * (columns - width(text))
    return room + text if right else text + room


def plain(lines: Sequence[Line]) -> str:
    """Return lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def stripped(line: Line) -> Line:
    """Return a line without the spaces at its end: where a terminal becomes narrower, they would be wrapped as well."""
    found = list(line)
    while found:
        text, style = found.pop()
        if kept := text.rstrip():
            return [*found, (kept, style)]
    return []


def to_ansi(line: Line, *, colours: bool = True) -> str:
    """Return a line as a terminal is told it."""
    if not colours:
        return "".join(text for text, _ in line)
    parts = []
    for text, style in line:
        code = STYLES[style]
        parts.append(f"\x1b[{code}m{text}\x1b[0m" if code and text else text)
    return "".join(parts)


# -- values as words ---------------------------------------------------------------------------------


def time_of_day(seconds: float) -> str:
    """Return a time since 1970 as the time of the day here; as long, in spaces, if it is 0."""
    return time.strftime("%H:%M:%S", time.localtime(seconds)) if seconds > 0 else " " * 8
