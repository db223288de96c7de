"""Process of a run, its forks, and sentences on standard error."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import sys
from typing import Any, Final

from unisono.core.errors import UsageError

__all__ = ["IS_WATCHED", "Process", "tell"]

_kept: Final[list[Any]] = []


class Process:
    """The process that a run was made in. A fork takes no part: its open files and connections are the parent's."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ended = ""

    @property
    def is_this(self) -> bool:
        return os.getpid() == self._pid

    def end(self, how: str) -> None:
        """Refuse what follows in this process as well: the run has ended, in this way."""
        self._ended = how

    def check(self, what: str) -> None:
        """Check that this is the process of the run, and that the run has not ended.

        Raises:
            UsageError: this is a fork of that process, or the run has ended.
        """
        if self._ended and self.is_this:
            raise UsageError(f"{what} was called after the end of the run: {self._ended}")
        if not self.is_this:
            raise UsageError(
                f"{what} was called in process {os.getpid()}, a fork of process {self._pid}, which made the run: a "
                "fork takes no part in it. End it with os._exit() when its work is done, or create a separate "
                "unisono.Run there, with another directory"
            )

    def keep(self, thing: object) -> None:
        """Keep an object alive in a fork, where freeing it would affect the other process."""
        if not self.is_this:
            _kept.append(thing)


def tell(text: str) -> None:
    """Print a sentence on standard error, if the script has left one that can be written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def _disown() -> None:
    """In a fork: the loader processes are not its children, and multiprocessing would end them when it exits."""
    getattr(multiprocessing.process, "_children", set()).clear()


os.register_at_fork(after_in_child=_disown)


IS_WATCHED: Final = os.environ.get("UNISONO_WATCH") != "0"
"""False: no view, no journal, no events for them, no samples of machines. Internal: such a run cannot be resumed."""
