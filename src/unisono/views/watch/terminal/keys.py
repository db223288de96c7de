"""Keys that a user presses, one by one and without their echo."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from typing import Any, Final

__all__ = ["Keyboard"]

_NAMED: Final = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown", b"\x1b[Z": "left", b"\x1b[H": "pageup", b"\x1b[F": "pagedown",
}  # fmt: skip


class Keyboard:
    """The keyboard of a terminal, as long as the context lasts.

    Args:
        descriptor: of the terminal. One that is no terminal has no keys.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: Any = None
        self._is_over = descriptor < 0 or not os.isatty(descriptor)

    def __enter__(self) -> Keyboard:
        if not self._is_over:
            self._before = termios.tcgetattr(self._descriptor)
            self._prepare()
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None and self._is_in_front():
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)

    def wait(self, timeout_s: float) -> list[str]:
        """Return the keys that were pressed, or none after this time. "q" also where the terminal is gone."""
        if self._is_over:
            select.select([], [], [], timeout_s)
            return []
        self._prepare()
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return []
        try:
            data = os.read(self._descriptor, 1024)
        except OSError:
            data = b""
        self._is_over = not data
        return _keys(data) if data else ["q"]

    def _prepare(self) -> None:
        """Have single keys. Again after Ctrl-Z and fg, because the shell has set what it wants."""
        with contextlib.suppress(termios.error, OSError):
            if self._is_in_front() and termios.tcgetattr(self._descriptor)[3] & termios.ICANON:
                tty.setcbreak(self._descriptor, termios.TCSANOW)

    def _is_in_front(self) -> bool:
        """Return whether this process may change the terminal: one in the background would be stopped."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # it is not the terminal that controls this process
            return True


def _keys(data: bytes) -> list[str]:
    found = []
    while data:
        name = next((name for name in _NAMED if data.startswith(name)), b"")
        if name:
            found.append(_NAMED[name])
        elif not data.startswith(b"\x1b"):
            found.append(data[:1].decode("ascii", "replace"))
        data = data[max(1, len(name)) :]
    return found
