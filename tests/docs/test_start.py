"""The script of docs/start.md, as a reader runs it: alone, and on three workers of which one is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.house.rooms import ROOT
from tests.waiting import PATIENT, WAIT_S
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's script with two epochs instead of a hundred."""
    (block,) = [block for block in blocks(ROOT / "docs" / "start.md") if block.mark == "script"]
    assert "epochs = 100\n" in block.text
    path = tmp_path / "train.py"
    path.write_text(block.text.replace("epochs = 100\n", "epochs = 2\n"))
    return path


def test_the_first_script_gives_the_same_bits_alone_and_without_a_killed_worker(script: Path, tmp_path: Path) -> None:
    def unisono(*words: object) -> str:
        command = [sys.executable, "-m", "unisono", *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout  # fmt: skip

    subprocess.run([sys.executable, script], cwd=tmp_path, timeout=WAIT_S, check=True, stdout=subprocess.DEVNULL)
    faults = Faults().kill("w1", step=9, at="after_backward")
    three = run_workers(script, 3, directory=tmp_path / "three", faults=faults, options=PATIENT, timeout_s=WAIT_S)
    assert three.exit_code == 0, three.output
    assert max(three.generations) > 1, "no worker was lost"
    assert unisono("compare", "runs/spirals", "three").startswith("identical: 28 steps")
