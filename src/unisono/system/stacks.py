"""Tracebacks and stacks of this process, as a user wants to see them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback as tracebacks
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from unisono.core.errors import DivergenceError, UsageError

__all__ = ["frame_outside", "in_one_line", "is_own", "level_outside", "show_stacks", "trimmed_traceback"]

OWN_FOLDER: Final = f"{Path(__file__).parents[1]}{os.sep}"


def show_stacks(worker_id: str) -> None:
    """Write the stack of each thread to standard error: to the file, even where ``sys.stderr`` is something else."""
    with contextlib.suppress(OSError):
        os.write(2, f"{worker_id} is stuck here:\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)


def level_outside() -> int:
    """Return the ``stacklevel`` with which the caller's warning is about the line of the script."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def frame_outside() -> FrameType | None:
    """Return the innermost frame that is not of this library: that of the script's call; None if there is none."""
    found: FrameType | None = sys._getframe(1)
    while found is not None and is_own(found.f_code.co_filename):
        found = found.f_back
    return found


def in_one_line(error: BaseException) -> str:
    """Return the error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def trimmed_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without the frames of this library at its beginning.

    For an error in the use of the library, the frames of the library at the end are left out as well: the line that
    the user has to change is then the last one.
    """
    found: TracebackType | None = error.__traceback__
    while found is not None and is_own(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    shown = found or error.__traceback__
    lines = tracebacks.TracebackException(type(error), error, shown)
    if isinstance(error, (UsageError, DivergenceError)):
        frames = list(lines.stack)
        while frames and is_own(frames[-1].filename):
            frames.pop()
        if frames:
            lines.stack = tracebacks.StackSummary.from_list(frames)
    return "".join(lines.format())


def is_own(filename: str) -> bool:
    """Return whether a file of Python code is of this library, or of what starts a script."""
    return filename.startswith(("<frozen ", OWN_FOLDER)) or Path(filename).name == "runpy.py"
