"""The wheel and the source distribution, built once for all tests of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed; `make test` installs it"
)


def build(source: Path, target: Path, *options: str) -> Path:
    """Build the distributions of a source tree into a folder, which is returned."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", target, *options]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session", name="built")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))
