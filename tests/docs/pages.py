"""The code blocks of README and docs/, and the marks that stand before them.

A mark is an HTML comment on the line above a block, which no reader sees: ``<!-- block: in a step -->``. The marks:

- none: Python that runs as it stands; names that it reads and does not make come from `tests.docs.world`.
- ``script``: a whole script, which has a test of its own (`tests/docs/test_start.py`).
- ``goes on``: it follows the Python block above, in the same namespace.
- ``in a step``: the body of ``for step in run.steps(...)``.
- ``in a micro-batch``: the body of the inner loop.
- ``with runs``: finished runs are in ``runs/digits``, ``runs/a`` and ``runs/b``.
- ``with shards``: 128 tar files are in ``data``.
- ``not run: REASON``: it has to compile (Python), or is no command (anything else).

A block of ``diff`` is the Python of its side after the change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.house.rooms import ROOT

__all__ = ["MARKS", "PAGES", "Block", "blocks", "inline_commands"]

PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS: Final = ("", "script", "goes on", "in a step", "in a micro-batch", "with runs", "with shards", "not run: ")
FENCE: Final = re.compile(
    r"(?:^ *<!-- block: (?P<mark>.*?) -->\n\n?)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of its first line, in the page; from 1."""
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order; a diff as the Python that it makes."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["text"].splitlines()]
        language = match["language"]
        if language == "diff":
            language, lines = "python", ["" if line.startswith("-") else line[1:] for line in lines]
        line = text[: match.start("text")].count("\n") + 1
        found.append(Block(page, line, language, match["mark"] or "", "\n".join(lines) + "\n"))
    return found


def inline_commands(page: Path) -> list[str]:
    """All `unisono ...` that stand within a sentence or a table."""
    without_blocks = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [words.replace("\\|", "|") for words in re.findall(r"`(unisono [a-z][^`\n]*)`", without_blocks)]
