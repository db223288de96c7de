"""Writes docs/llms.txt, the list of pages for programs that read the documentation (https://llmstxt.org).

python -m website.llms
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["PAGE", "main", "text"]

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "llms.txt"
HEAD: Final = """\
# Unisono

> Trains an ordinary PyTorch model on any number of workers, with the same bits whatever their number, and whoever is
> lost or joins. Linux, Python 3.11 or newer, torch 2.6 or newer. Tested on CPUs and an emulated device.

To port a script, follow [assistant.md](assistant.md), and verify the result with `unisono check train.py`, which exits
with 0 if the first steps have the same bits alone, on two workers, and over a loss and a join, and otherwise names the
line. `unisono compare RUN_A RUN_B` compares whole runs.
"""


def text() -> str:
    """Return the list: the pages of mkdocs.yml in their groups, each with its first sentence."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    parts = [HEAD]
    for line in nav.splitlines():
        if group := re.match(r"  - ([\w-]+):$", line):
            parts.append(f"\n## {group[1]}\n\n")
        elif found := re.match(r" +- (?:(.+): )?(\w+)\.md$", line):
            page = ROOT / "docs" / f"{found[2]}.md"
            if page.exists():
                parts.append(f"- [{_title(page)}]({page.name}): {_first_sentence(page)}\n")
    return "".join(parts)


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def _first_sentence(page: Path) -> str:
    """Return the first sentence of prose, without marks."""
    without_blocks = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    paragraphs = [part.strip() for part in without_blocks.split("\n\n")[1:]]
    prose = next((part for part in paragraphs if re.match(r"[\w*`]", part)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace("**", "")
    return re.split(r"(?<=[.!?])(?= |$)", plain)[0]


def main() -> None:
    PAGE.write_text(text())


if __name__ == "__main__":
    main()
