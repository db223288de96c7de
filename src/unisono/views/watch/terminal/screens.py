"""Pages of `unisono watch`: the whole run, or one part of it with all the room."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from unisono.core.words import harmless
from unisono.record.overview import Overview
from unisono.views.watch.terminal.curve import draw_curve
from unisono.views.watch.terminal.drawing import draw, fitted, header, levels, made_harmless, workers_rows
from unisono.views.watch.terminal.text import Line, cut, filled, time_of_day

__all__ = ["PAGES", "Looked", "draw_page", "turned"]

PAGES: Final = ("run", "workers", "events", "loss")
_HELP: Final = (
    ("q", "quit; the run continues"),
    ("tab, right, left", "next page, previous page: run, workers, events, loss"),
    ("1 2 3 4", "that page"),
    ("down, up, space, b", "scroll"),
    ("?", "this help"),
)


@dataclass(frozen=True)
class Looked:
    """What a user looks at."""

    page: str = PAGES[0]
    first: int = 0
    """So many rows were scrolled by."""
    has_help: bool = False


def turned(looked: Looked, key: str, rows: int) -> Looked:
    """Return what a user looks at after a key was pressed; the same for a key that means nothing."""
    at = PAGES.index(looked.page)
    if looked.has_help:
        return replace(looked, has_help=False)
    match key:
        case "?" | "h":
            return replace(looked, has_help=True)
        case "\t" | "right":
            return Looked(PAGES[(at + 1) % len(PAGES)])
        case "left":
            return Looked(PAGES[at - 1])
        case "down" | "j":
            return replace(looked, first=looked.first + 1)
        case "up" | "k":
            return replace(looked, first=max(0, looked.first - 1))
        case " " | "pagedown":
            return replace(looked, first=looked.first + max(1, rows - 4))
        case "b" | "pageup":
            return replace(looked, first=max(0, looked.first - max(1, rows - 4)))
        case _ if key.isdecimal() and 0 < int(key) <= len(PAGES):
            return Looked(PAGES[int(key) - 1])
    return looked


def draw_page(
    overview: Overview, looked: Looked, note: str, columns: int, rows: int, *, unicode: bool = True
) -> tuple[list[Line], Looked]:
    """Return the lines of a page with a last one for the note and the keys, and where the page really begins."""
    room = max(1, rows - 1)
    lines: list[Line]
    if looked.has_help:
        wide = min(18, columns)
        lines = [[(filled(key, wide), "bold"), (cut(words, columns - wide), "")] for key, words in _HELP][:room]
    elif looked.page == "run" or room < 6 or columns < 24:
        lines = draw(overview, columns, room, unicode=unicode, most_recent=room)
    else:
        overview = made_harmless(overview)
        head = header(overview, columns, unicode=unicode)
        part, first = _DRAWN[looked.page](overview, looked.first, columns, room - len(head), unicode)
        lines, looked = head + part, replace(looked, first=first)
    lines += [[]] * (room - len(lines))
    lines.append(_footer(note, looked, columns))
    return [fitted(line, columns, unicode=unicode) for line in lines[:rows]], looked


def _footer(note: str, looked: Looked, columns: int) -> Line:
    if note:
        return [(cut(harmless(note.partition("\n")[0]), columns), "warning")]
    if looked.has_help:
        return [(cut("any key goes back", columns), "dim")]
    keys = "q quit  ? help  tab " + " ".join(f"[{page}]" if page == looked.page else page for page in PAGES)
    return [(cut(keys, columns), "dim")]


def _scrolled(lines: Sequence[Line], first: int, rows: int) -> tuple[list[Line], int]:
    """Return so many lines from one on, or the last ones."""
    first = max(0, min(first, len(lines) - rows))
    return list(lines[first : first + rows]), first


def _workers(overview: Overview, first: int, columns: int, rows: int, unicode: bool) -> tuple[list[Line], int]:
    legend, *lines = workers_rows(overview, columns, len(overview.workers) + 2, unicode=unicode)
    shown, first = _scrolled(lines, first, rows - 1)
    return [legend, *shown], first


def _events(overview: Overview, first: int, columns: int, rows: int, unicode: bool) -> tuple[list[Line], int]:
    """Return the sentences in full, the newest first."""
    lines: list[Line] = []
    for each in reversed(overview.recent):
        parts = textwrap.wrap(each.text, max(8, columns - 10)) or [""]
        for number, part in enumerate(parts):
            clock = time_of_day(each.time) if number == 0 else " " * 8
            lines.append([(clock + "  ", "dim"), (cut(part, columns - 10), levels(each.level))])
    return _scrolled(lines, first, rows)


def _loss(overview: Overview, first: int, columns: int, rows: int, unicode: bool) -> tuple[list[Line], int]:
    return draw_curve(overview.curve, columns, max(2, rows - 1), last=overview.step, unicode=unicode), 0


_DRAWN: Final[dict[str, Callable[[Overview, int, int, int, bool], tuple[list[Line], int]]]] = {
    "workers": _workers,
    "events": _events,
    "loss": _loss,
}
