"""The documentation stays small, fits on a screen, and each of its pages is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, blocks
from tests.house.rooms import ROOT
from website import llms

MOST_PAGES, MOST_WORDS = 40, 50_000
MOST_LINES = 120
"""Of the README."""
COLUMNS = 88
"""What a screen of 1280 pixels shows of a line of code; a phone wraps it."""
DOCS = ROOT / "docs"
WORD = re.compile(r"[^\s|]*\w[^\s|]*")
FIGURE = re.compile(r"!\[([^\]]*)\]\((assets/[\w.-]+|watching\.png)\)")


def words(page: Path) -> int:
    """The words of a page, with those in code and tables."""
    return len(WORD.findall(page.read_text()))


def test_there_are_few_pages_and_words() -> None:
    assert len(PAGES) - 1 <= MOST_PAGES, "merge two pages: README does not count"
    counts = {page.name: words(page) for page in PAGES}
    assert sum(counts.values()) <= MOST_WORDS, f"say less: {counts}"


def test_words_are_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n| one | `two three` |\n|---|---|\n- four, five.\n")
    assert words(page) == 7


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_on_a_screen(page: Path) -> None:
    wide = [f"{block}: {line}" for block in blocks(page) for line in block.text.splitlines() if len(line) > COLUMNS]
    assert wide == []


def test_every_page_stands_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r" (\w+\.md)$", navigation, re.MULTILINE)
    assert sorted(set(named) - {"index.md", "changelog.md"}) == sorted(page.name for page in DOCS.glob("*.md"))
    assert len(named) == len(set(named))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_have_words_for_those_who_do_not_see_them(page: Path) -> None:
    assert [path for words, path in FIGURE.findall(page.read_text()) if len(words.split()) < 5] == []


def test_the_list_for_programs_is_that_of_today() -> None:
    assert llms.PAGE.read_text() == llms.text(), "`python -m website.llms` writes it again"


def test_the_list_for_programs_has_all_pages_with_a_sentence() -> None:
    rows = re.findall(r"^- \[.+\]\((\w+)\.md\): (.*)$", llms.text(), re.MULTILINE)
    assert {name for name, _ in rows} == {page.stem for page in DOCS.glob("*.md")}
    assert [name for name, sentence in rows if len(sentence.split()) < 4] == []
