"""An example that logs to a tool, of which the worker that logs is killed.

The tool's package may take long to import where every process waits for its turn, and a run does not wait for that at
its end. So the last steps come when the next writer has logged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.testing import Faults

__all__ = ["STEPS", "run_with_a_killed_writer"]

STEPS = 12
KILLED = 5
LATE = 10
ROOT = Path(__file__).parents[2]


def run_with_a_killed_writer(
    example: str, unisono: Unisono, folder: Path, num_logged: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an example on two workers for `STEPS` steps, into ``folder / "run"``.

    Args:
        num_logged: how many steps the tool has by now.
    """
    for name, value in Faults().kill("w0", at="after_step", step=KILLED).environment().items():
        monkeypatch.setenv(name, value)
    with Gates(folder / "gates", [LATE]) as gates:
        script = (ROOT / "tests" / "workers" / "gated.py", "--", ROOT / "examples" / example, gates.folder)
        command = unisono("run", "-n", 2, "--run-dir", folder / "run", *script, "--steps", STEPS)
        wait_until(lambda: num_logged() > KILLED + 1, "the next writer logs")
        gates.open(LATE)
        assert command.wait() == 0, command.err
    assert any("worker w0" in line for line in [*command.out, *command.err])
