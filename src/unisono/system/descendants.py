"""All processes below one: found, and ended, whatever sessions and groups they have put themselves into."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

__all__ = ["descendants", "end_descendants"]

KILL_S: Final = 10.0  # for a killed process to be gone: its memory is freed, its last read from a disk comes back
LOOK_AGAIN_S: Final = 0.02


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below one, parents before their children.

    A process whose parent has ended is still found if process ``pid`` adopts orphans
    (`unisono.system.lifetime.adopt_orphans`). One that ends while it is looked for may hide its siblings: who must find
    all looks again.
    """
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):  # another system, or a process that has ended
        import psutil

        try:
            return [found.pid for found in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            return []
    found: dict[int, None] = {}
    waiting = [pid]
    while waiting:
        more = [child for child in _children(waiting.pop()) if child not in found]
        found |= dict.fromkeys(more)
        waiting += more
    return list(found)


def _children(pid: int) -> list[int]:
    """Return the processes that the threads of a process have started, of those that run or were not reaped yet."""
    texts = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                texts.append(Path(f"/proc/{pid}/task/{thread}/children").read_text())
    return [int(word) for text in texts for word in text.split()]


def end_descendants(patience_s: float) -> None:
    """End all processes below this one: SIGTERM, and after this time SIGKILL. Reaps this process's children.

    Call it in a process that adopts orphans, and that waits for none of its children elsewhere any more.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + patience_s
    while not _are_gone():
        asked |= _signal(signal.SIGTERM, besides=asked)  # again: some may have been started meanwhile
        now = time.monotonic()
        if now > deadline + KILL_S:
            return  # the kernel holds one of them
        if now > deadline:
            _signal(signal.SIGKILL)
        time.sleep(LOOK_AGAIN_S)


def _signal(number: signal.Signals, besides: Collection[int] = ()) -> set[int]:
    """Send a signal to all processes below this one that are not in ``besides``; return them."""
    pids = {*descendants(os.getpid())} - {*besides}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return pids


def _are_gone() -> bool:
    """Reap the children that have ended; return whether there was no other."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False
