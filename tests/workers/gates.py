"""Gates at which `small_training` waits for the test: at the head of a step, all workers, and exactly there."""

from __future__ import annotations

import fcntl
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from tests.waiting import WAIT_S

__all__ = ["ARRIVALS", "Gates", "wait_at"]

ARRIVALS = "arrivals"


def wait_at(gate: Path) -> None:
    """In a worker: tell the test, and block while it holds this gate."""
    if gate.exists():
        with gate.open() as file, (gate.parent / ARRIVALS).open("w") as arrivals:
            arrivals.write(f"{gate.name}\n")
            arrivals.flush()
            fcntl.flock(file, fcntl.LOCK_SH)


class Gates:
    """Closed gates at the heads of these steps. Leaving the ``with`` (or the death of this process) opens all."""

    def __init__(self, folder: Path, steps: Iterable[int]) -> None:
        self.folder = folder
        folder.mkdir()
        os.mkfifo(folder / ARRIVALS)
        self._arrivals = os.open(folder / ARRIVALS, os.O_RDWR)  # also for writing: it never ends
        self._arrived: set[int] = set()
        self._rest = b""
        self._files = {step: (folder / str(step)).open("w") for step in steps}
        for file in self._files.values():
            fcntl.flock(file, fcntl.LOCK_EX)

    def wait(self, step: int, timeout_s: float = WAIT_S) -> None:
        """Until a worker is at this gate."""
        deadline = time.monotonic() + timeout_s
        while step not in self._arrived:
            ready, _, _ = select.select([self._arrivals], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no worker has come to gate {step} within {timeout_s} s"
            *lines, self._rest = (self._rest + os.read(self._arrivals, 4096)).split(b"\n")
            self._arrived.update(map(int, lines))

    def open(self, step: int) -> None:
        """Let all pass."""
        self._files.pop(step).close()

    def __enter__(self) -> Gates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for step in list(self._files):
            self.open(step)
        os.close(self._arrivals)
