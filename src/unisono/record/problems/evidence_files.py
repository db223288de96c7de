"""Files of evidence in a run's directory: a bounded number, and never another run's directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from unisono.record.rundir import PROBLEMS, holder
from unisono.system.owned import write_whole

__all__ = ["FOLDER", "MOST_FILES", "stamp", "write"]

FOLDER: Final = PROBLEMS
MOST_FILES: Final = 100
"""In one run's directory, over all of its heads."""


def stamp(now: float) -> str:
    """Return a time of the day, by the clock of this machine, as a part of a file's name.

    Args:
        now: seconds since 1970.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03}"


def write(directory: Path, run_id: str, name: str, content: str) -> bool:
    """Write a file of evidence; return whether it is there. Blocks on the disk: not for an event loop.

    Args:
        run_id: the directory must be that of this run: it may have been moved, and another been made in its place.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    if holder(directory) != run_id:
        return False
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    if sum(1 for _ in folder.glob("*.txt")) >= MOST_FILES:
        return False
    write_whole(folder / name, content.encode(errors="replace"))
    return True
