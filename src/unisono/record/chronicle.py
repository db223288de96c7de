"""Chronicle of a run: the file of its events that are no steps (``events.jsonl``), a line each, in the run's directory.

Several processes may tell the same events (the agents of a run do); the one that holds the file's lock writes. The
kernel frees the lock when that process ends, however it ends, and the next one appends what the file lacks. A thread
writes, so neither a full disk nor one that stands still holds up who tells.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.core.events import EvaluationFinished, Event, LinesLost, MachineUsed, Once, RunEnded, RunStarted
from unisono.record.journal.lines import NO_LINE, plain
from unisono.record.journal.newest import Newest
from unisono.record.rundir import EVENTS_FILE, USE_FILE, holder
from unisono.system.threads import NamedThread

__all__ = ["KEPT", "Chronicle", "line_of"]

KEPT: Final = 4_000
"""So many of the newest lines are kept while they cannot be written, or another process writes them."""
TAIL_BYTES: Final = 1 << 20
"""The end of the file that is looked at for lines that another process has written."""
FIRST_S: Final = 1.0
"""How often the process that is to write looks whether it can."""
OTHERS_S: Final = 15.0
"""How often another one does."""
CLOSE_S: Final = 2.0
"""How long the end of a process waits for the disk."""
EVALUATION_S: Final = 5.0
"""Least time between two evaluations in the file; the journal has all of them."""
USE_S: Final = 10.0
"""Least time between two records of what the machines use."""
_WITHOUT_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def line_of(event: Event, run_id: str) -> str:
    """Return the line of an event: equal for equal events."""
    known: dict[str, Any] = msgspec.to_builtins(event)
    first = {"time": round(event.time, 6), "kind": known.pop("kind"), "run_id": run_id}
    return json.dumps(plain({**first, **{name: value for name, value in known.items() if name not in first}}))


class Chronicle:
    """This process's part in writing the file. Its methods return at once, but `close`, which waits for `CLOSE_S`.

    Args:
        is_first: returns whether this process is the one that is to write, before all others.
    """

    def __init__(self, is_first: Callable[[], bool] = lambda: True) -> None:
        self._is_first = is_first
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._num_dropped = 0
        self._directory: Path | None = None
        self._run_id = ""
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._leaves = False
        self._is_new = False  # where to write
        self._pid = os.getpid()
        self._file: _File | None = None
        self._uses: dict[str, MachineUsed] = {}
        """By host, what is not written yet."""
        self._used_at = 0.0
        self._evaluated_at = 0.0
        self.has_end = False
        """The end of the run was told."""

    @property
    def writes(self) -> bool:
        """Whether this process writes the file."""
        return self._file is not None

    def tell(self, event: Event) -> None:
        """Tell an event, once (`unisono.core.events.Once`)."""
        with self._changed:
            if isinstance(event, EvaluationFinished):
                if 0 <= event.time - self._evaluated_at < EVALUATION_S:
                    return
                self._evaluated_at = event.time
            self.has_end = isinstance(event, RunEnded) or (self.has_end and not isinstance(event, RunStarted))
            self._events.append(event)
            if len(self._events) > KEPT:
                self._events.popleft()
                self._num_dropped += 1
            self._changed.notify()

    def use(self, used: Sequence[MachineUsed]) -> None:
        """Keep what machines use at the moment, where this process writes, of the newest time (`Newest`)."""
        with self._changed:
            if self._file is None or not used:
                return
            self._uses |= {each.host: each for each in used}
            self._changed.notify()

    def write_to(self, directory: Path, run_id: str) -> None:
        """Write into this directory of the run, as soon as it is there and no other process does."""
        with self._changed:
            if (self._directory, self._run_id) == (directory, run_id):
                return
            self._directory, self._run_id, self._is_new = directory, run_id, True
            if self._thread is None and not self._is_closing:
                self._thread = NamedThread(self._run, "unisono-story")
                self._thread.start()
            self._changed.notify()

    def leave(self) -> None:
        """Let others write, and forget what is not written: this process takes part in another story from now on."""
        with self._changed:
            self._events.clear()
            self._num_dropped, self.has_end, self._leaves = 0, False, True
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, where no other process writes. Nothing follows."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():
            thread.join(CLOSE_S)

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._is_closing:
                        self._changed.wait_for(self._has_work, FIRST_S if self._is_first() else OTHERS_S)
                    leaves, self._leaves, self._is_new = self._leaves, False, False
                    is_closing, directory, run_id = self._is_closing, self._directory, self._run_id
                if leaves:
                    self._free()
                elif directory is not None:
                    self._write(directory, run_id)
                if is_closing:
                    return
        finally:
            self._free()

    def _has_work(self) -> bool:
        can_write = self._file is not None and not self._file.fails and (bool(self._events) or self._has_use())
        return self._is_closing or self._leaves or self._is_new or can_write

    def _has_use(self) -> bool:
        newest = max((each.time for each in self._uses.values()), default=0.0)
        return bool(self._uses) and (self._is_closing or not 0.0 <= newest - self._used_at < USE_S)

    def _write(self, directory: Path, run_id: str) -> None:
        if self._file is not None and not self._file.is_in(directory):
            self._free()
        if self._file is None:
            if holder_of(directory) != run_id or (found := _File.take(directory / EVENTS_FILE, run_id)) is None:
                return
            self._file = found
        file = self._file
        with self._changed:
            events, num_dropped = list(self._events), self._num_dropped
        once = Once(file.newest)
        missing = [event for event in events if once.is_new(event)]
        is_continued = len(missing) < len(events)  # by another process until now
        texts = [line_of(event, run_id) for event in missing]
        if num_dropped and not is_continued:
            gap = LinesLost(time=missing[0].time if missing else time.time(), first=1, last=num_dropped)
            texts.insert(0, line_of(gap, run_id))
        if texts and not file.append(texts):
            return
        file.newest = once.newest
        with self._changed:
            for event in events:
                if self._events and self._events[0] is event:
                    self._events.popleft()
            self._num_dropped = max(0, self._num_dropped - num_dropped)  # `leave` may have come in between
        self._write_use(file)

    def _write_use(self, file: _File) -> None:
        with self._changed:
            if not self._has_use():
                return
            used, self._uses = [*self._uses.values()], {}
            self._used_at = max(each.time for each in used)
        with contextlib.suppress(OSError):  # what only a view shows
            file.uses.add([msgspec.json.encode(used)])

    def _free(self) -> None:
        with self._changed:
            self._uses.clear()
            file, self._file = self._file, None
        if file is not None:
            file.close()


def holder_of(directory: Path) -> str | None:
    """Return the id of the run that a directory holds; None where there is none, or it cannot be read now."""
    try:
        return holder(directory)
    except OSError:
        return None


_open: set[_File] = set()


def _close_in_child() -> None:
    """A fork of a script shares the lock, and may outlive this process: let it go there."""
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


class _Told(msgspec.Struct):
    """The part of a line that says which event it is."""

    run_id: str
    number: int = -1
    head: str = ""


_told: Final = msgspec.json.Decoder(_Told)


class _File:
    """The file, locked by this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        self.uses = Newest(path.with_name(USE_FILE))
        """What the machines use, beside this file."""
        _open.add(self)
        self.fails = False
        """The last attempt to write has failed."""
        self.newest: dict[str, int] = {}
        """The newest numbers in the file (`Once`): what another process has written may be told here as well, or
        again."""

    @staticmethod
    def take(path: Path, run_id: str) -> _File | None:
        """Return the file; None: another process holds it, or it cannot be opened."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                os.close(descriptor)
                return None
        file = _File(path, descriptor)
        try:
            file._read_tail(run_id)
        except OSError:
            file.close()
            return None
        return file

    def is_in(self, directory: Path) -> bool:
        """Return whether the file of this directory is still this one."""
        try:
            return os.path.samestat(os.stat(directory / EVENTS_FILE), os.fstat(self._descriptor))
        except OSError:
            return False

    def append(self, lines: Iterable[str]) -> bool:
        """Append lines; return False where that fails. Then the file is as it was."""
        data = "".join(f"{line}\n" for line in lines).encode()
        self.fails = True
        size = -1
        try:
            size = os.fstat(self._descriptor).st_size
            left = memoryview(data)
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                if size >= 0:
                    os.ftruncate(self._descriptor, size)
            return False
        self.fails = False
        return True

    def close(self) -> None:
        _open.discard(self)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _read_tail(self, run_id: str) -> None:
        """Read which events of the run were written last, and cut off half a line that a killed process has left."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - TAIL_BYTES)
        data = os.pread(self._descriptor, size - start, start)
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.ftruncate(self._descriptor, start + end)
        for text in data[:end].splitlines():
            with contextlib.suppress(*NO_LINE):
                line = _told.decode(text)
                if line.run_id == run_id and line.number >= 0:
                    self.newest[line.head] = line.number
