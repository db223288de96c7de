"""Where CI is set, nothing is skipped but for a reason that is listed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

LISTED, NOT_LISTED = "no IPv6 here", "no accelerator here"


@pytest.mark.parametrize(
    ("reason", "ci", "counts"),
    [
        (LISTED, "true", "1 passed, 2 skipped"),
        (NOT_LISTED, "", "1 passed, 2 skipped"),
        (NOT_LISTED, "true", "1 passed, 1 failed, 1 error"),
    ],
)
def test_a_skip_is_a_failure_unless_it_is_listed(reason: str, ci: str, counts: str, tmp_path: Path) -> None:
    """Of a test, and of a whole file."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(f"""
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip({reason!r})
""")
    (tmp_path / "test_other.py").write_text(f"import pytest\npytest.skip({reason!r}, allow_module_level=True)\n")
    environment = {**os.environ, "CI": ci}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", tmp_path]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    last = done.stdout.splitlines()[-1]
    assert all(count in last for count in counts.split(", ")), done.stdout
    assert done.returncode == (1 if "failed" in counts else 0)
    assert (f"skipped: {reason}" in done.stdout) == ("failed" in counts)
