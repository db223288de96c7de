"""Threads whose names the system shows as well: ``top -H``, ``ps -L``, ``/proc/PID/task/TID/comm``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["NamedThread"]


class NamedThread(threading.Thread):
    """A daemon thread. On Linux the system knows its name, up to 15 characters, which Python does from 3.14 on.

    Args:
        work: what it does.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)

    def run(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/thread-self/comm").write_text(self.name[:15])
        super().run()
