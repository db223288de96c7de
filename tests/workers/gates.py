"""Gates at which `small_training` waits for the test: at the head of a step, all workers, and exactly there.

A gate may be opened for a generation: then every worker goes on when it has heard of that one. So a test that has seen
the head announce a change knows at which step all agree on it, however late a busy machine lets a worker hear.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from tests.waiting import WAIT_S
from unisono.cluster.worker import member as members
from unisono.core.messages import Notice

__all__ = ["ARRIVALS", "Gates", "wait_at"]

ARRIVALS = "arrivals"


class _Heard:
    """The newest generation that this worker's team has heard of."""

    def __init__(self, member: members.Member) -> None:
        self._changed = threading.Condition()
        latest = member.latest()
        self._generation = latest.generation if latest is not None else 0
        self._is_over = False
        member.on_notice(self._hear)  # the team asked for that before: what this one has heard, that one has

    def _hear(self, notice: Notice | None) -> None:
        with self._changed:
            self._is_over |= notice is None
            self._generation = max(self._generation, notice.generation if notice is not None else 0)
            self._changed.notify_all()

    def wait(self, generation: int) -> None:
        with self._changed:
            heard = self._changed.wait_for(lambda: self._is_over or self._generation >= generation, WAIT_S)
        assert heard, f"generation {generation} was not heard of within {WAIT_S} s"


_heard: list[_Heard] = []


def wait_at(gate: Path) -> None:
    """In a worker, at every step: tell the test, and block while it holds this gate."""
    if not _heard and (member := members.current()) is not None:
        _heard.append(_Heard(member))
    if gate.exists():
        with gate.open() as file, (gate.parent / ARRIVALS).open("w") as arrivals:
            arrivals.write(f"{gate.name}\n")
            arrivals.flush()
            fcntl.flock(file, fcntl.LOCK_SH)
            generation = int(file.read() or 0)
        for heard in _heard:
            heard.wait(generation)


class Gates:
    """Closed gates at the heads of these steps. Leaving the ``with`` (or the death of this process) opens all."""

    def __init__(self, folder: Path, steps: Iterable[int]) -> None:
        self.folder = folder
        folder.mkdir()
        os.mkfifo(folder / ARRIVALS)
        self._arrivals = os.open(folder / ARRIVALS, os.O_RDWR)  # also for writing: it never ends
        self._arrived: Counter[int] = Counter()
        self._rest = b""
        self._files = {step: (folder / str(step)).open("w") for step in steps}
        for file in self._files.values():
            fcntl.flock(file, fcntl.LOCK_EX)

    def wait(self, step: int, timeout_s: float = WAIT_S, *, workers: int = 1) -> None:
        """Until so many workers are at this gate; the others may still be in the step before."""
        deadline = time.monotonic() + timeout_s
        while self._arrived[step] < workers:
            ready, _, _ = select.select([self._arrivals], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{self._arrived[step]} of {workers} workers have come to gate {step} within {timeout_s} s"
            *lines, self._rest = (self._rest + os.read(self._arrivals, 4096)).split(b"\n")
            self._arrived.update(map(int, lines))

    def open(self, step: int, generation: int = 0) -> None:
        """Let all pass; each when it has heard of this generation (`Command.generation`)."""
        with self._files.pop(step) as file:
            file.write(str(generation))

    def __enter__(self) -> Gates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for step in list(self._files):
            self.open(step)
        os.close(self._arrivals)
