"""Folders that live as long as the process that has made them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from unisono.system.lifetime import scratch_folder

KEEPER = """
import sys
from unisono.system.lifetime import scratch_folder
with scratch_folder("unisono-test-") as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_it_is_removed_at_the_end() -> None:
    with scratch_folder("unisono-test-") as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_it_is_removed_after_an_error() -> None:
    with pytest.raises(ValueError, match="wrong"), scratch_folder("unisono-test-") as folder:
        raise ValueError("wrong")
    assert not folder.exists()


def test_it_is_removed_when_its_process_is_killed() -> None:
    """The shell that removes it has the standard output of the process, so that ends when the shell has ended."""
    command = [sys.executable, "-c", KEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "sub" / "file").exists()
        process.kill()
        process.communicate(timeout=WAIT_S)
    assert not folder.exists()
