"""The example with a model in stages trains where one process cannot hold the model, with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.limited import limit_memory
from tests.workers.processes import Seat, Team
from unisono.system.controlgroups import control_groups

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("nursery")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "large_language_model.py"
UNISONO = [sys.executable, "-m", "unisono"]
FEW = ["--steps", "2", "--batch-size", "8", "--microbatches", "8", "--length", "16", "--test-windows", "8"]
FEW += ["--modules", "12"]
SMALL = [*FEW, "--width", "64", "--depth", "6"]
IN_SHARDS = ["--recompute", "--stages", "2", "--shards", "2"]
"""Two parts of the layers, for each of two parts of the processes."""
LARGE = [*FEW, "--width", "384", "--depth", "10"]
"""17.9 million parameters."""
SLOT_BYTES = 4 * 17_900_000
"""Of all parameters, and of one sum of their gradients."""
LIMIT = 5 * SLOT_BYTES
"""Between a fourth of what one process needs, and all of it: the parameters, two states of each, and at least the three
sums that are under way at the last of four micro-batches."""


def _limit(seat: Seat, folder: Path, limit: int) -> str:
    try:
        limit_memory(folder, limit)
    except OSError as error:
        return str(error)
    return ""


@pytest.fixture
def groups() -> Iterator[Path]:
    """A control group in which processes with limits may be made; skipped where that is not permitted."""
    folder = next((group.folder for group in control_groups("memory")), None)
    if folder is None:
        pytest.skip("memory cannot be limited here: there are no control groups")
    with Team(1, _limit, folder, LIMIT) as team:
        refused = team.result(0)
    _remove(folder)
    if refused:
        pytest.skip(f"memory cannot be limited here: {refused}")
    yield folder
    _remove(folder)


def _remove(folder: Path) -> None:
    for group in folder.glob("unisono-test-*"):
        if not (group / "cgroup.procs").read_text().strip():
            group.rmdir()


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def limited(groups: Path, workers: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Train the large model, each worker within the limit."""
    options = ["--workers", workers, "--max-restarts", "0", "--run-dir", directory]
    script = [ROOT / "tests" / "workers" / "limited.py", *options, "--", groups, str(LIMIT), EXAMPLE]
    return run(*UNISONO, "run", *script, *LARGE)


def test_four_processes_train_what_one_cannot_hold(groups: Path, tmp_path: Path) -> None:
    four = limited(groups, "1x4", tmp_path / "four")
    assert four.returncode == 0, four.stdout + four.stderr
    assert re.search(r"test loss [\d.]+ bits per byte", four.stdout + four.stderr)
    one = limited(groups, "1", tmp_path / "one")
    assert one.returncode != 0, "one process fits into the limit: the test shows nothing"
    assert re.search(r"ran out of memory .*control group ran out of memory \(3\d\d MB\)", one.stdout + one.stderr)


@pytest.mark.parametrize("more", [[], IN_SHARDS], ids=["plain", "shards"])
def test_one_process_and_four_have_the_same_bits(more: Sequence[str], tmp_path: Path) -> None:
    for workers in ("1", "1x4"):
        directory = tmp_path / workers
        done = run(*UNISONO, "run", EXAMPLE, "--workers", workers, "--run-dir", directory, "--", *SMALL, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: 2 steps" in run(*UNISONO, "compare", tmp_path / "1", tmp_path / "1x4").stdout
