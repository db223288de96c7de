"""Life of the runs of this process: a run ends once, with its ``with`` block, by ``close()``, or with the script.

Under ``unisono run`` the worker calls `end_all` with what has ended the script. Where a script runs alone, a run that
is not in a ``with`` block ends with

- an unhandled exception: ``sys.excepthook`` is replaced while such a run is open, and gets it before it is shown;
- else the interpreter's exit (`atexit`), and that well: nobody sees there by which exit code the script ends.

``os._exit`` and signals that end the process skip all of this; the journal has no end then.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.util
import sys
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

from unisono.system.process import Process, tell
from unisono.system.stacks import in_one_line, trimmed_traceback

__all__ = ["Ends", "begun", "end_all", "end_forgotten", "ended", "in_block"]

BEFORE_OTHERS: Final = 1000


class Ends(Protocol):
    """What ends with the script: a `unisono.Run`."""

    @property
    def is_training(self) -> bool:
        """Whether the script is between the first step of a training loop and its end."""

    def end(self, error: BaseException | None, *, is_at_exit: bool = False) -> None:
        """End, because of this exception; None: all is well. Does nothing the second time.

        Args:
            is_at_exit: of the interpreter, which does not know whether ``sys.exit`` has brought it there.
        """

    def explain(self, error: BaseException) -> object:
        """Add notes to an exception of the script."""


@dataclass
class _Open:
    """A run that has begun and not ended, in the process that made it."""

    run: Ends
    process: Process
    is_alone: bool
    is_in_block: bool = False
    """A ``with`` block will end it."""


_open: Final[list[_Open]] = []
_watches: Final[list[_Watch]] = []
"""At most one: while a run of a script that runs alone is open."""


def begun(run: Ends, *, is_alone: bool) -> None:
    """Note that a run has begun: it ends with the script at the latest.

    Args:
        is_alone: no worker calls `end_all` at the end of the script.
    """
    _open.append(_Open(run, Process(), is_alone))
    if is_alone:
        _stop_watching()
        _watches.append(_Watch())
        _register()


def in_block(run: Ends) -> None:
    """Note that a ``with`` block ends the run."""
    for each in _open:
        if each.run is run:
            each.is_in_block = True


def ended(run: Ends) -> None:
    """Note that a run has ended."""
    _open[:] = [each for each in _open if each.run is not run]
    if not any(each.is_alone for each in _own()):
        _stop_watching()


def end_forgotten() -> None:
    """End the runs of this process that no ``with`` block will end, because another one begins."""
    for each in _own():
        if each.is_in_block:
            continue
        try:
            each.run.end(_error_of_prompt(each.run))
        except Exception as failure:
            warnings.warn(
                f"the previous run was still open, and ended with an error: {in_one_line(failure)}",
                stacklevel=4,
            )


def end_all(error: BaseException | None, *, is_at_exit: bool = False) -> BaseException | None:
    """End all open runs of this process, the newest first.

    Args:
        error: what has ended the script; None: its end.
        is_at_exit: as of `Ends.end`.

    Returns:
        The error that counts: ``error``, or that of an end that has failed.
    """
    for each in reversed(_own()):
        try:
            each.run.end(error, is_at_exit=is_at_exit)
        except BaseException as failure:
            error = failure
    return error


def _own() -> list[_Open]:
    """Return the open runs that this process has made. A fork has none of its parent's, and keeps them alive."""
    return [each for each in _open if each.process.is_this]


def _stop_watching() -> None:
    while _watches:
        _watches.pop().close()


class _Watch:
    """Watch for an exception that ends a script that runs alone."""

    def __init__(self) -> None:
        self.error_before = _shown_error()
        self._is_over = False
        self._hook, self._own_hook = sys.excepthook, self._on_exception
        sys.excepthook = self._own_hook

    def close(self) -> None:
        """Give back what was replaced. What somebody else has put in its place since then stays, and still works."""
        self._is_over = True
        if sys.excepthook is self._own_hook:
            sys.excepthook = self._hook

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        failure = None
        if self._is_over:
            pass
        elif _is_interactive():  # a wrong line at the prompt ends nothing
            for each in _own():
                each.run.explain(error)
        else:
            failure = end_all(error)
        self._hook(kind, error, traceback)
        if failure is not None and failure is not error:
            self._hook(type(failure), failure, failure.__traceback__)


def _register() -> None:
    """Have the runs of this process ended when it exits."""
    if multiprocessing.parent_process() is not None:  # such a process skips `atexit`
        multiprocessing.util.Finalize(None, _at_end_of_child, exitpriority=BEFORE_OTHERS)
    atexit.unregister(_at_end)
    atexit.register(_at_end)


def _at_end() -> None:
    """End the runs at the interpreter's exit."""
    if not (mine := _own()):
        return
    error = _error_of_prompt(mine[-1].run)
    if _show(end_all(error, is_at_exit=True), error):
        _exit_with(1)


def _at_end_of_child() -> None:
    """End the runs at the end of a process of multiprocessing, which has its exception in hand."""
    error = sys.exc_info()[1]
    if _show(end_all(error), error):
        raise SystemExit(1)


def _show(failure: BaseException | None, error: BaseException | None) -> bool:
    """Show the error of an end that has failed. Returns whether there was one."""
    if failure is None or failure is error:
        return False
    tell(trimmed_traceback(failure).rstrip("\n"))
    return True


def _error_of_prompt(run: Ends) -> BaseException | None:
    """Return the exception that was shown last at a prompt, if it has probably ended the training loop of the run."""
    error = _shown_error()
    is_new = bool(_watches) and error is not _watches[-1].error_before
    return error if _is_interactive() and is_new and run.is_training else None


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _shown_error() -> BaseException | None:
    return getattr(sys, "last_value", None)


def _exit_with(code: int) -> None:
    """Give this process an exit code, though the interpreter's shutdown has begun, where Python cannot change it."""
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(code), None)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)  # the one that comes last is called first
