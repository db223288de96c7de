"""A thread that writes to a terminal. Nobody else ever waits for the terminal: one that is not read, or that is slow,
costs its own lines and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono.system.threads import NamedThread
from unisono.views.watch.terminal.canvas import Canvas, size_of
from unisono.views.watch.terminal.text import Line

__all__ = ["PICTURE_EVERY_S", "Picture", "Screen", "rows_beside_output"]

PICTURE_EVERY_S: Final = 1.0
LINES_EVERY_S: Final = 0.25
"""Lines that come within this time are written together."""
BACKGROUND_EVERY_S: Final = 30.0
"""In the background (``&``, or after Ctrl-Z and ``bg``) a line takes the place of the picture, so often."""
MOST_LINES: Final = 100_000
"""So many lines wait for a terminal that takes none; then the oldest are left out."""
CLOSE_S: Final = 3.0
"""For a terminal to take the last lines."""
_STOPPED_S: Final = 1.0
"""If the thread was not run for so long, the process may have been stopped, and the shell have written something."""

Picture = Callable[[int, int], tuple[Sequence[Line], str]]
"""Makes the picture for so many columns and rows, and the line that takes its place in the background."""


class Screen:
    """A terminal, with a picture at its bottom. Made in the main thread, where it learns that the process goes on.

    Args:
        descriptor: of the terminal.
        share: makes the part of the terminal's rows that the picture may have.
    """

    def __init__(
        self,
        descriptor: int,
        encoding: str,
        picture: Picture,
        *,
        colours: bool,
        share: Callable[[int], int],
        every_s: float = PICTURE_EVERY_S,
    ) -> None:
        self._descriptor, self._encoding, self._picture, self._share = descriptor, encoding, picture, share
        self._every_s = every_s
        self._canvas = Canvas(colours=colours)
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._last: list[str] = []
        self._lock = threading.Lock()
        self._wakes = threading.Condition(self._lock)
        self._has_picture = self._is_closing = self._is_gone = self._was_stopped = self._is_urgent = False
        self._was_behind = False
        self._told_at = 0.0
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGCONT, self._on_continue)
        self._thread: threading.Thread | None = None
        """From the first thing on that there is to show."""

    def show(self) -> None:
        """Have a picture from now on."""
        if not self._has_picture:
            self._has_picture = True
            self.refresh()

    def refresh(self) -> None:
        """Draw the picture soon, not only when it is due."""
        with self._lock:
            self._is_urgent = True
            self._wake()

    def put(self, line: str) -> None:
        """Write a line above the picture. Returns at once."""
        with self._lock:
            if len(self._lines) >= MOST_LINES:
                self._lines.popleft()
                self._num_lost += 1
            self._lines.append(line)
            if len(self._lines) == 1:
                self._wake()

    def close(self, *last: str) -> None:
        """Write what is left, the picture once more and then the last lines, as far as the terminal takes them soon."""
        with self._lock:
            if self._is_closing:
                return
            self._last = list(last)
            self._is_closing = True
            thread = self._wake()
        thread.join(CLOSE_S)
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCONT, self._before)  # else the process is about to end, and the handler sets a flag

    # -- the thread ----------------------------------------------------------------------------------

    def _wake(self) -> threading.Thread:
        """Have the thread look. The caller has the lock."""
        if self._thread is None:
            self._thread = NamedThread(self._work, "unisono-screen")
            self._thread.start()
        self._wakes.notify()
        return self._thread

    def _work(self) -> None:
        seen = time.monotonic()
        while True:
            with self._lock:
                if not (self._is_closing or self._is_urgent or self._lines):
                    self._wakes.wait(self._every_s)
            if not self._is_closing:
                time.sleep(LINES_EVERY_S if self._lines else 0.0)
            now = time.monotonic()
            if now - seen > _STOPPED_S:
                time.sleep(0.05)  # for the main thread to learn whether the process was stopped
            seen = time.monotonic()
            with self._lock:
                lines, self._lines = self._lines, deque()
                num_lost, self._num_lost = self._num_lost, 0
                closing, self._is_urgent = self._is_closing, False
            if num_lost:
                lines.appendleft(f"unisono: {num_lost:,} lines are left out here: the terminal was too slow")
            self._write(self._frame(lines, seen, is_last=closing))
            if closing:
                return

    def _frame(self, lines: Sequence[str], now: float, *, is_last: bool) -> str:
        """Return what is to be written now."""
        if self._was_stopped:
            self._was_stopped = False
            self._canvas.forget()
        columns, rows = size_of(self._descriptor)
        if self._is_behind():
            return self._lines_only(lines, now, columns, rows, is_last=is_last)
        if self._was_behind:
            self._was_behind = False
            self._canvas.forget()
        parts = [self._canvas.frame(lines, self._drawing(columns, rows), columns)]
        if is_last:
            self._canvas.forget()
            parts += [f"{line}\r\n" for line in self._last]
        return "".join(parts)

    def _drawing(self, columns: int, rows: int) -> Sequence[Line]:
        if not self._has_picture:
            return []
        return self._picture(columns, min(rows - 1, self._share(rows)))[0]

    def _lines_only(self, lines: Sequence[str], now: float, columns: int, rows: int, *, is_last: bool) -> str:
        """Return what is written while the shell has the terminal."""
        self._was_behind = True
        found = list(lines)
        if self._has_picture and (is_last or now - self._told_at >= BACKGROUND_EVERY_S):
            self._told_at = now
            found.append(self._picture(columns, rows)[1])
        return "".join(f"{line}\r\n" for line in (*found, *(self._last if is_last else ())))

    def _is_behind(self) -> bool:
        """Return whether the process is in the background of its terminal."""
        try:
            return os.tcgetpgrp(self._descriptor) != os.getpgrp()
        except OSError:  # it is not the terminal that controls this process
            return False

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, "backslashreplace"))
        while data and not self._is_gone:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has set this for the terminal that they share
                with contextlib.suppress(OSError):
                    select.select([], [self._descriptor], [], 1.0)
            except OSError:  # the terminal is gone; the run goes on
                self._is_gone = True

    def _on_continue(self, number: int, frame: Any) -> None:
        self._was_stopped = True
        if callable(self._before):
            self._before(number, frame)


def rows_beside_output(rows: int) -> int:
    """Return how many rows of a terminal a picture may have that leaves room for what workers print."""
    return min(48, max(1, rows - 4) if rows <= 24 else max(20, rows * 5 // 8))
