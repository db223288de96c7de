"""What is shipped: the wheel and the source distribution build, and hold what they should."""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

import unisono
from tests.house.built import build, built_once, needs_hatchling  # a fixture among them  # noqa: F401
from tests.house.rooms import SOURCE

pytestmark = needs_hatchling


def test_the_wheel_holds_the_whole_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    information = f"unisono-{unisono.__version__}.dist-info"
    assert wheel.name == f"unisono-{unisono.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"{information}/entry_points.txt").decode()
    source = {f"unisono/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*") if path.is_file()}
    assert {name for name in source if "__pycache__" not in name} == {
        name for name in names if not name.startswith(information)
    }
    assert {"unisono/py.typed", "unisono/views/page/static/index.html"} <= names
    assert f"{information}/licenses/LICENSE" in names
    assert "unisono = unisono.cli:main" in entry_points
    assert "[pytest11]\nunisono = unisono.testing.plugin\n" in f"{entry_points}\n"


def test_the_source_distribution_can_be_built_from_and_tested(built: Path, tmp_path: Path) -> None:
    """It gives the same wheel, byte by byte, and has what the tests need."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "Makefile"} <= names
    assert {
        "src/unisono/core/tree.py",
        "tests/house/test_package.py",
        "tests/data/run-0.1/journal.jsonl",
        "examples/digits.py",
        "constraints.txt",
    } <= names
    assert not any(name.startswith(("data/", ".venv/", "runs/", ".demo/")) or name.endswith(".pyc") for name in names)
    (wheel,) = built.glob("*.whl")
    (again,) = build(next(tmp_path.iterdir()), tmp_path / "again", "-t", "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert first.namelist() == second.namelist()
        assert [name for name in first.namelist() if first.read(name) != second.read(name)] == []


def description(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_string(archive.read(f"unisono-{unisono.__version__}.dist-info/METADATA").decode())


def test_a_distribution_for_an_index_has_addresses_and_no_relative_link(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not for an index names none: there is no address until somebody publishes the project."""
    readme = (SOURCE.parents[1] / "README.md").read_text()
    here = description(next(built.glob("*.whl")))
    assert here.get_all("Project-URL") is None
    assert here.get_payload() == readme
    monkeypatch.setenv("UNISONO_URL", "https://example.org/owner/unisono/")
    there = description(next(build(SOURCE.parents[1], tmp_path, "-t", "wheel").glob("*.whl")))
    place = f"https://example.org/owner/unisono/blob/v{unisono.__version__}"
    assert "Homepage, https://example.org/owner/unisono" in there.get_all("Project-URL", [])
    assert f"Changelog, {place}/CHANGELOG.md" in there.get_all("Project-URL", [])
    text = str(there.get_payload())
    assert f"]({place}/docs/start.md)" in text
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []
    assert text.replace(f"{place}/", "") == readme
    assert there["Description-Content-Type"] == "text/markdown"
