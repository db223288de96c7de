"""What is shipped: the wheel and the source distribution build, and hold what they should."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import unisono
from tests.house.rooms import ROOT, SOURCE
from tests.waiting import WAIT_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed; requirements/demo.txt has it"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", directory]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return directory


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
    assert "unisono/py.typed" in names
    assert f"{information}/licenses/LICENSE" in names
    assert "unisono = unisono.cli:main" in entry_points


def test_the_source_distribution_can_be_built_from_and_tested(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "Makefile"} <= names
    assert {
        "src/unisono/decisions/tree.py",
        "tests/house/test_package.py",
        "examples/digits.py",
        "requirements/test.txt",
    } <= names
    assert not any(name.startswith(("data/", ".venv/", "runs/", ".demo/")) or name.endswith(".pyc") for name in names)
