"""Tracing of a script: what each of its statements reads and writes, as it runs.

Only files of the script are traced: those that lie neither in Python's own folders nor in those of installed packages.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from unisono.tools.check.records import StatementEvent
from unisono.tools.check.statements import SourceStatement, Statements, read_script
from unisono.tools.check.value_texts import MISSING, resolve, text_of

__all__ = ["MAX_EVENTS", "Tracer", "is_of_script"]

MAX_EVENTS: Final = 40_000
"""Of a section: two for each statement that is executed."""
_INNER: Final = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_EVALUATION: Final = os.path.join("unisono", "engine", "rounds", "evaluation.py")

Local = Callable[[FrameType, str, Any], Any]


def _folders_of_others() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = str(Path(__file__).resolve().parents[2])
    known = {os.path.realpath(path) for name in names if (path := sysconfig.get_path(name))}
    return tuple(f"{folder}{os.sep}" for folder in (*sorted(known), own))


def is_of_script(path: str) -> bool:
    """Return whether a file belongs to the script, and not to Python or to an installed package."""
    if path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    real = os.path.realpath(path)
    return not real.startswith(_folders_of_others()) and os.path.exists(real)


class Tracer:
    """Traces this thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._files: dict[str, Statements | None] = {}
        self._open: dict[FrameType, tuple[SourceStatement, dict[str, str]]] = {}
        self._evaluating: dict[FrameType, int] = {}
        self._events: list[StatementEvent] = []
        self._evaluated: dict[int, list[StatementEvent]] = {}
        self._depth = 0
        self._is_cut = False
        self._look: Callable[[], str] | None = None
        self._changes: list[tuple[str, str, SourceStatement]] = []

    def start(self) -> None:
        """Trace what this thread runs from now on, the functions that it is in included."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._script_of(frame.f_code) is not None:
                frame.f_trace = self._local
                self._depth += 1
            frame = frame.f_back
        sys.settrace(self._called)

    def stop(self) -> None:
        """Trace no more."""
        sys.settrace(None)
        for frame in self._open:
            frame.f_trace = None
        self._open.clear()

    def take(self) -> tuple[list[StatementEvent], bool]:
        """Return the events since the last call, and whether there were more than are kept."""
        events, is_cut = self._events, self._is_cut
        self._events, self._is_cut = [], False
        return events, is_cut

    def watch(self, look: Callable[[], str] | None) -> None:
        """After each statement, call ``look``, which returns the name of what has changed since the last call; "" if
        nothing has. None: call nothing.
        """
        self._look = look

    def take_changes(self) -> list[tuple[str, str, SourceStatement]]:
        """Return what `watch` has found since the last call: name, file, and the statement after which it was found."""
        changes, self._changes = self._changes, []
        return changes

    def take_evaluated(self) -> dict[int, list[StatementEvent]]:
        """Return the events of evaluations since the last call, by batch: they are not among the others, because each
        worker evaluates other batches.
        """
        evaluated, self._evaluated = self._evaluated, {}
        return evaluated

    @property
    def depth(self) -> int:
        """How many functions of the script are being executed."""
        return self._depth

    # -- what Python calls ---------------------------------------------------------------------------

    def _called(self, frame: FrameType, event: str, _: Any) -> Local | None:
        if event != "call" or self._script_of(frame.f_code) is None or frame.f_code.co_name in _INNER:
            return None
        if (batch := self._batch_of(frame)) is not None:
            self._evaluating[frame] = batch
        self._depth += 1
        return self._local

    def _local(self, frame: FrameType, event: str, value: Any) -> Local:
        if event == "line":
            script = self._script_of(frame.f_code)
            statement = script.at(frame.f_lineno) if script is not None else None
            before = self._open.get(frame)
            if statement is not None and (before is None or before[0] is not statement):
                self._end(frame)
                self._begin(frame, statement)
        elif event == "return":
            self._end(frame, {"return": text_of(value)} if value is not None else {})
            self._evaluating.pop(frame, None)
            self._depth -= 1
        return self._local

    # -- statements ----------------------------------------------------------------------------------

    def _begin(self, frame: FrameType, statement: SourceStatement) -> None:
        values = self._values(frame, statement.paths)
        self._open[frame] = statement, values
        self._add(frame, statement, {path: values[path] for path in statement.loads if path in values}, is_end=False)

    def _end(self, frame: FrameType, more: dict[str, str] | None = None) -> None:
        opened = self._open.pop(frame, None)
        if opened is None:
            return
        statement, before = opened
        if self._look is not None and (name := self._look()):
            self._changes.append((name, frame.f_code.co_filename, statement))
        now = self._values(frame, statement.paths)
        changed = {path: text for path, text in now.items() if text != before.get(path)}
        stored = {path: now[path] for path in statement.stores if path in now}
        self._add(frame, statement, stored | changed | (more or {}), tuple(changed), is_end=True)

    def _add(
        self,
        frame: FrameType,
        statement: SourceStatement,
        values: dict[str, str],
        changed: tuple[str, ...] = (),
        *,
        is_end: bool,
    ) -> None:
        batch = self._evaluating.get(frame)
        events = self._events if batch is None else self._evaluated.setdefault(batch, [])
        if len(events) >= MAX_EVENTS:
            self._is_cut = True
            return
        name = frame.f_code.co_filename
        events.append(StatementEvent(is_end, name, statement.line, values, self._depth, changed))

    def _values(self, frame: FrameType, paths: tuple[str, ...]) -> dict[str, str]:
        names, others = frame.f_locals, frame.f_globals
        found = {path: resolve(path, names, others) for path in paths}
        return {path: text_of(value) for path, value in found.items() if value is not MISSING}

    # -- whose code ----------------------------------------------------------------------------------

    def _script_of(self, code: CodeType) -> Statements | None:
        path = code.co_filename
        if path not in self._files:
            self._files[path] = None
            if is_of_script(path):
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    self._files[path] = read_script(Path(path).read_text(encoding="utf-8"))
        return self._files[path]

    def _batch_of(self, frame: FrameType) -> int | None:
        """Return the batch that is being evaluated where this function is called; None: it is no evaluation."""
        above = frame.f_back
        while above is not None:
            if above in self._evaluating:
                return self._evaluating[above]
            if above.f_code.co_filename.endswith(_EVALUATION) and isinstance(found := above.f_locals.get("batch"), int):
                return found
            if self._script_of(above.f_code) is not None:
                return None
            above = above.f_back
        return None
