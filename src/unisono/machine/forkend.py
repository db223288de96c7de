"""End of a worker that was forked from a nursery: Python's shutdown, but for what the worker shares with the nursery.

Python's shutdown takes all modules apart. In a fork that writes to, and so copies, the memory of everything that the
nursery has imported: a third of a second of a core for each worker, half of it in the kernel. Here only what was made
after the fork is taken apart; the kernel frees the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import stat
import sys
import threading
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

__all__ = ["end_of_worker"]


def end_of_worker(code: int, shared: Collection[str]) -> NoReturn:
    """End this process with an exit code, as Python does: wait for threads, call what `atexit` has, then destroy the
    script's objects, so that its files are written and its temporary files are gone.

    Args:
        shared: names of the modules that were imported before the fork, whose objects are frozen (`gc.freeze`).
    """
    try:
        # What Python itself calls, in this order; it has no public names.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # Garbage is destroyed in any order, a file perhaps before the text that is to go into it.
        _flush(filter(_is_open_file, gc.get_objects()))
        for name in [*(sys.modules.keys() - shared), "__main__"]:
            sys.modules.pop(name, None)
        gc.collect()
        _flush((sys.stdout, sys.stderr))
        ctypes.CDLL(None).fflush(None)
    finally:
        os._exit(code)


def _flush(streams: Iterable[Any]) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):  # the script may have put anything there, None included
            stream.flush()


def _is_open_file(value: object) -> bool:
    """Return whether this is a file that is being written; a pipe that nobody reads would be waited for."""
    with contextlib.suppress(Exception):
        if isinstance(value, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)) and not value.closed:
            return stat.S_ISREG(os.fstat(value.fileno()).st_mode)
    return False
