"""The right to write into the run's directory: of two sides that a cut network has made, one has it.

The head of a side holds it for its workers, as a lock on a file in the directory, which the kernel frees when the head
ends. So where both sides see the same directory, no file is written by two.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from unisono.record.rundir import RUN_FILE, holder, read_facts

__all__ = ["Pen", "come_back", "leave"]

PEN_FILE: Final = ".head"
LEFT_FILE: Final = "run.left.json"


class Pen:
    """This head's part of the lock."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._descriptor: int | None = None

    def take(self, run_dir: str) -> bool:
        """Take the lock; return whether this side may write.

        It may where this machine does not see the directory, or the file system has no locks: then there is no way to
        tell.
        """
        if self._descriptor is not None or not run_dir:
            return True
        folder = Path(run_dir)
        try:
            if holder(folder) != self._run_id:
                return True
            descriptor = os.open(folder / PEN_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        self._descriptor = descriptor
        return True

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        """Let the other side write."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def leave(run_dir: str, run_id: str) -> str:
    """Have no worker write into a directory any more, because the run goes on in another one; returns a sentence about
    that. What was written stays.
    """
    folder = Path(run_dir)
    try:
        if holder(folder) != run_id:
            return ""
        (folder / RUN_FILE).replace(folder / LEFT_FILE)
    except OSError as error:
        return f"{folder / RUN_FILE} cannot be renamed: {error}"
    return (
        f"the run goes on in the directory of the side that has come further. {folder} of this machine keeps what was "
        f"written until now ({RUN_FILE} is named {LEFT_FILE})"
    )


def come_back(folder: Path, run_id: str) -> bool:
    """Let workers write into a directory again that this run has left (`leave`); return whether it had.

    Raises:
        OSError: the description cannot be renamed.
    """
    if (folder / RUN_FILE).exists() or read_facts(folder, LEFT_FILE).get("run_id") != run_id:
        return False
    (folder / LEFT_FILE).replace(folder / RUN_FILE)
    return True
