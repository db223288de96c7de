"""A reader of the command's output that stands still holds up neither the run nor its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.waiting import WAIT_S
from tests.workers.conftest import MARK, marked, wait_until_gone

TALKS = """
    import time
    for number in range(5000):
        print("x" * 100, number)
    open("printed", "w").write("all")
    time.sleep(1000)
    """


def test_a_signal_ends_a_run_whose_output_nobody_reads(script: Callable[[str], str], tmp_path: Path, mark: str) -> None:
    name = script(TALKS)
    os.mkfifo(tmp_path / "printed")
    with (tmp_path / "errors").open("wb") as errors:
        run = subprocess.Popen(
            [sys.executable, "-m", "unisono", "run", "--workers", "1", name],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=tmp_path,
            env={**os.environ, MARK: mark},
        )
    assert run.stdout is not None
    with run.stdout:
        printed = os.open(tmp_path / "printed", os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert select.select([printed], [], [], WAIT_S)[0], (tmp_path / "errors").read_text()
        finally:
            os.close(printed)
        run.send_signal(signal.SIGTERM)
        try:
            assert run.wait(WAIT_S) == 128 + signal.SIGTERM, (tmp_path / "errors").read_text()
        finally:
            run.kill()
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}
