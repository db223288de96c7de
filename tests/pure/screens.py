"""A terminal of few words, for tests of what is written to one: it keeps what has scrolled off, too."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\x1b\[(?P<private>\??)(?P<number>[0-9;]*)(?P<final>[A-Za-z])|(?P<character>.)", re.DOTALL)


class Terminal:
    """Obeys the few sequences that the library writes, and raises at any other."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[list[str]] = [[]]
        """What has scrolled off, and then the screen."""
        self.row = self.column = 0
        self.wraps = True
        self.styles: set[str] = set()

    @property
    def text(self) -> list[str]:
        """All lines that were ever shown, without the spaces at their ends."""
        return ["".join(line).rstrip() for line in self.lines]

    def write(self, text: str) -> None:
        for token in _TOKENS.finditer(text):
            if (character := token["character"]) is not None:
                self._put(character)
            else:
                self._obey(token["private"] + token["final"], token["number"])

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        else:
            assert character.isprintable(), repr(character)
            if self.column == self.columns:
                if not self.wraps:
                    self.column -= 1
                else:
                    self.column = 0
                    self._down()
            line = self.lines[self.row]
            line += " " * (self.column + 1 - len(line))
            line[self.column] = character
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _obey(self, what: str, number: str) -> None:
        match what:
            case "A":
                self.row = max(0, len(self.lines) - self.rows, self.row - int(number or 1))
                self.column = min(self.column, self.columns - 1)
            case "K":
                del self.lines[self.row][min(self.column, self.columns - 1) :]
            case "J":
                del self.lines[self.row][min(self.column, self.columns - 1) :]
                for line in self.lines[self.row + 1 :]:
                    line.clear()
            case "m":
                self.styles.add(number)
            case "?h" | "?l" if number == "7":
                self.wraps = what == "?h"
            case "?h" | "?l" if number == "2026":
                pass
            case _:
                raise AssertionError(f"unknown: {what} {number}")
