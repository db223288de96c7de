"""The project speaks of itself only, and what it links to is there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.rooms import ROOT

# Spelled apart, so that this file may be in the tree that it reads.
FORBIDDEN = [
    r"/wo" + r"rk/",
    r"/ho" + r"me/\w",
    r"/ro" + r"ot/",
    r"/Us" + r"ers/\w",
    r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    r"\bNot" + r"ImplementedError\b",
    r"^(<{7}|>{7}) ",
]
BINARY = {".png", ".gif", ".ico", ".gz", ".woff2"}
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

RECORDED = str(ROOT / "tests" / "data" / "run-")
"""Runs as the library has written them."""


def files() -> list[Path]:
    """All files of the tree that git knows or would add; all but the usual build outputs where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        found = [
            path
            for path in ROOT.rglob("*")
            if not {".venv", ".try", "data", "runs", ".demo"} & set(path.relative_to(ROOT).parts)
        ]
    return [
        path
        for path in found
        if path.is_file()
        and path.suffix not in BINARY
        and "__pycache__" not in path.parts
        and RECORDED not in str(path)
    ]


def lines() -> Iterator[tuple[Path, int, str]]:
    for path in files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield path.relative_to(ROOT), number, line


def test_nothing_speaks_of_the_machine_that_it_was_written_on() -> None:
    pattern = re.compile("|".join(FORBIDDEN))
    found = [f"{path}:{number}: {line.strip()[:100]}" for path, number, line in lines() if pattern.search(line)]
    assert not found, "\n".join(found)


def test_text_files_end_well() -> None:
    """No trailing blanks, one newline at the end: a diff shows what was changed."""
    found = [f"{path}:{number}" for path, number, line in lines() if line != line.rstrip() and path.name != "LICENSE"]
    ends = [
        str(path)
        for path in files()
        if (text := path.read_text()) and (not text.endswith("\n") or text.endswith("\n\n"))
    ]
    assert found + ends == []


def anchor_of(title: str) -> str:
    """GitHub's name for a heading: lower case, blanks to dashes, without the rest."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.strip())
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    return {anchor_of(title) for title in re.findall(r"^#+ (.+)$", without_code(document.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(document.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken, f"{document.relative_to(ROOT)} links to what is not there: {broken}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(document: Path) -> None:
    """``tests/house/test_floors.py`` in a text is a promise as much as a link is."""
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+\.\w+)`", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_rules_that_are_tested_are_not_vacuous() -> None:
    assert len(files()) > 30
    assert ROOT / "README.md" in DOCUMENTS
