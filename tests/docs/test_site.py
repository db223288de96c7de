"""The site builds without a broken link, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; `make test-more` installs it"),
]

LOADS = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site. Not with ``--quiet``: what is not said is not counted, and no warning ends the build then."""
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n[to nowhere](nowhere.md)\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    strict = [line for line in settings.splitlines() if line.startswith("strict:")]
    (tmp_path / "mkdocs.yml").write_text("\n".join(["site_name: small", *strict]) + "\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert [name for name in sorted(pages) if not (site / name / "index.html").exists()] == []
    assert "Many workers, one result" in (site / "index.html").read_text()


def test_pictures_stand_in_the_pages_and_the_notebook_has_its_output(site: Path) -> None:
    assert (site / "why" / "index.html").read_text().count('<svg class="picture"') == 4
    assert (site / "index.html").read_text().count('<svg class="picture"') == 4
    assert "identical: 40 steps" in (site / "examples" / "index.html").read_text()


def test_the_reference_has_a_page_for_each_topic(site: Path) -> None:
    assert 'href="run/"' in (site / "api" / "index.html").read_text()
    assert 'id="unisono.Run.steps"' in (site / "api" / "run" / "index.html").read_text()
    assert 'id="unisono.Step.again"' in (site / "api" / "steps" / "index.html").read_text()
    assert "unisono.Run.play" not in "".join(page.read_text() for page in site.glob("api/**/*.html"))


def test_pages_have_a_link_to_edit_them_where_the_repository_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_REPOSITORY", "https://example.org/unisono")
    assert build(ROOT / "mkdocs.yml", tmp_path).returncode == 0
    assert 'href="https://example.org/unisono/edit/main/docs/start.md"' in (tmp_path / "start/index.html").read_text()


def test_programs_find_the_pages(site: Path) -> None:
    named = re.findall(r"\]\((\w+)\.md\)", (site / "llms.txt").read_text())
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == set(named)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = [
        f"{path.relative_to(site)}: {address}"
        for path in site.rglob("*.html")
        for address in LOADS.findall(path.read_text())
    ]
    found += [
        f"{path.relative_to(site)}: {address}"
        for path in site.rglob("*.css")
        for address in re.findall(r"url\([\"']?((?:https?:)?//[^)]+)", path.read_text())
    ]
    assert not found


def test_what_loads_from_elsewhere_would_be_found() -> None:
    assert LOADS.findall('<link rel="stylesheet" href="https://fonts.example/a.css">') == [
        "https://fonts.example/a.css"
    ]
    assert LOADS.findall('<script src=//cdn.example/a.js></script> <a href="https://elsewhere">') == [
        "//cdn.example/a.js"
    ]
