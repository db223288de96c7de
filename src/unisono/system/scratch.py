"""A folder that lives as long as the process that has made it, also if that is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["scratch_folder"]

SWEEP: Final = (
    'trap "" TERM; cat > /dev/null; for n in 1 2 3 4 5; do [ -e "$0" ] || exit 0; rm -rf -- "$0"; sleep 1; done'
)
"""Removes a folder when its standard input ends, also where all processes get SIGTERM; again, where a process that is
just ending still writes there."""


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for temporary files, and remove it at the end.

    A shell waits for the end of a pipe that only this process holds, and removes the folder if that comes too early.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    reader, writer = os.pipe()
    try:
        sweeper = subprocess.Popen(["sh", "-c", SWEEP, folder], stdin=reader, start_new_session=True)
    finally:
        os.close(reader)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writer)
        sweeper.wait()
