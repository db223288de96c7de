"""A user's own `mypy --strict` understands the public interface."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

SCRIPTS = Path(__file__).with_name("typed")


def test_scripts_of_users_pass_a_strict_check_and_mistakes_do_not() -> None:
    """With the cache that `make check` has filled: most of the work is to read torch."""
    wrong = (SCRIPTS / "wrong.py").read_text().splitlines()
    expected = {
        (number, found[1])
        for number, line in enumerate(wrong, 1)
        if (found := re.search(r"# expected: ([\w-]+)$", line)) is not None
    }
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    told = {
        (Path(one.split(":")[0]).name, int(one.split(":")[1]), one.rpartition("[")[2].rstrip("]")) for one in errors
    }
    assert told == {("wrong.py", *each) for each in expected}, done.stdout + done.stderr
