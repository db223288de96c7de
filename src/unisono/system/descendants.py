"""All processes below this one: found, and ended, whatever sessions and groups they have put themselves into."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

import psutil

__all__ = ["descendants", "end_descendants"]

KILL_S: Final = 10.0  # for a killed process to be gone: its memory is freed, its last read from a disk comes back
LOOK_AGAIN_S: Final = 0.02


def descendants() -> list[int]:
    """Return the ids of all processes below this one, in no order.

    A process whose parent has ended is still found if this process adopts orphans
    (`unisono.system.lifetime.adopt_orphans`).
    """
    return [found.pid for found in psutil.Process().children(recursive=True)]


def end_descendants(patience_s: float) -> None:
    """End all processes below this one: SIGTERM, and after this time SIGKILL. Reaps this process's children.

    Call it in a process that adopts orphans, and that waits for none of its children elsewhere any more.
    """
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while not _are_gone():
        now = time.monotonic()
        if now > deadline + KILL_S:
            return  # the kernel holds one of them
        if now > deadline:
            _signal_all(signal.SIGKILL)  # again: some may have been started meanwhile
        time.sleep(LOOK_AGAIN_S)


def _signal_all(number: signal.Signals) -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _are_gone() -> bool:
    """Reap the children that have ended; return whether there was no other."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False
