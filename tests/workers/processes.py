"""Real processes for a test: started together, watched with a deadline, and ended whatever happens.

A test gives a function to each process and talks to it through its `Seat`; the test's side is `Team`::

    with Team(4, body, "argument") as team:
        assert team.hear(2) == "in the middle"
        team.kill(2)
        results = team.results()          # by rank; KILLED for the one that was killed

When the deadline passes, the stacks of all threads of all processes are in the error. No process outlives the
`with`, nor the test's own process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from tests.waiting import WAIT_S
from unisono.system.lifetime import scratch_folder

__all__ = ["KILLED", "Seat", "Team", "end_watching", "num_descriptors", "num_threads", "when_blocked_in"]

_WATCHER = "watches its caller"

KILLED = "killed by the test"
STACKS_S = 20.0  # how long a hung process has to write its stacks
_fork = multiprocessing.get_context("fork")


class Seat:
    """A process's own side."""

    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank = rank
        self.size = size
        self._connection = connection

    def say(self, word: Any) -> None:
        self._connection.send(("said", word))

    def hear(self) -> Any:
        """Blocks until the test says something."""
        return self._connection.recv()


@dataclass
class _Process:
    process: Any
    connection: Connection
    stacks: pathlib.Path
    result: Any = None
    ended: bool = False


class Team:
    """``size`` processes that run ``body(seat, *arguments)``; they have what the test's own process has imported."""

    def __init__(self, size: int, body: Callable[..., Any], *arguments: Any, deadline_s: float = WAIT_S) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._open = contextlib.ExitStack()
        self._folder = self._open.enter_context(scratch_folder("unisono-test-"))
        self._processes: list[_Process] = []
        gc.collect()  # or the processes would hold files and memory of earlier groups
        try:
            for rank in range(size):
                self._processes.append(self._start(rank, size, body, arguments))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for one in self._processes:
            one.process.kill()
            one.process.join()
            one.process.close()
            one.connection.close()
        self._open.close()

    def _start(self, rank: int, size: int, body: Callable[..., Any], arguments: tuple[Any, ...]) -> _Process:
        ours, theirs = _fork.Pipe()
        stacks = self._folder / f"stacks-{rank}"
        process = _fork.Process(target=_run, args=(Seat(rank, size, theirs), stacks, os.getpid(), body, arguments))
        # Inherited, with the file: a process that hangs in the fork itself must be able to say so.
        with theirs, stacks.open("w") as file:
            # Then the signal ends it: what an ended process has written is complete.
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=True)
            # What this process has left of earlier groups must not be collected there: their threads are not there.
            gc.disable()  # there until it has put all that aside
            try:
                process.start()
            finally:
                gc.enable()
                faulthandler.unregister(signal.SIGUSR1)
        return _Process(process, ours, stacks)

    def say(self, rank: int, word: Any) -> None:
        """Lost if that process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._processes[rank].connection.send(word)

    def hear(self, rank: int) -> Any:
        """The next thing that this process says."""
        kind, word = self._receive(rank)
        if kind != "said":
            raise AssertionError(f"process {rank} ended before it said anything more")
        return word

    def kill(self, rank: int) -> None:
        """SIGKILL; returns when it is dead."""
        one = self._processes[rank]
        one.process.kill()
        one.process.join()
        one.result, one.ended = KILLED, True

    def result(self, rank: int) -> Any:
        """What ``body`` returned in that process."""
        one = self._processes[rank]
        while not one.ended:
            self._receive(rank)
        return one.result

    def results(self) -> list[Any]:
        """What ``body`` returned, by rank."""
        return [self.result(rank) for rank in range(len(self._processes))]

    def _receive(self, rank: int) -> tuple[str, Any]:
        one = self._processes[rank]
        # All are watched: the one that failed is seldom the one that is waited for.
        ends = {other.process.sentinel: other for other in self._processes if not other.ended}
        while not one.connection.poll():
            left = self._deadline - time.monotonic()
            ready = multiprocessing.connection.wait([one.connection, *ends], max(left, 0))
            if not ready:
                raise AssertionError(f"not done after {self._deadline_s:.0f} s:\n{self._stacks()}")
            for end in ready:
                if end in ends:
                    self._check_end(ends.pop(end))
        try:
            kind, word = one.connection.recv()
        except EOFError:
            self._check_end(one)
            raise
        if kind == "raised":
            raise AssertionError(f"process {rank} raised:\n{word}")
        if kind == "returned":
            one.result, one.ended = word, True
        return kind, word

    def _check_end(self, one: _Process) -> None:
        one.process.join()
        rank, failure = self._processes.index(one), one.stacks.with_suffix(".failed")
        if failure.exists():
            raise AssertionError(f"process {rank} raised:\n{failure.read_text()}")
        if one.process.exitcode:
            raise AssertionError(f"process {rank} ended with exit code {one.process.exitcode}")

    def _stacks(self) -> str:
        living = [one for one in self._processes if one.process.is_alive()]
        for one in living:
            os.kill(one.process.pid, signal.SIGUSR1)
        until = time.monotonic() + STACKS_S
        text = []
        for one in living:
            one.process.join(max(0.0, until - time.monotonic()))
            text.append(f"process {self._processes.index(one)}:\n{one.stacks.read_text(errors='replace')}")
        return "\n".join(text)


def _run(seat: Seat, stacks: pathlib.Path, parent: int, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()
    gc.enable()
    _end_with_parent(parent)
    torch.set_num_threads(1)  # the threads of OpenMP that the tests' process may have do not survive the fork
    try:
        answer = ("returned", body(seat, *arguments))
    except BaseException:
        text = traceback.format_exc()
        stacks.with_suffix(".failed").write_text(text)
        answer = ("raised", text)
    seat._connection.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: an abandoned process group would block the interpreter's own end.
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def when_blocked_in(functions: set[str], act: Callable[[], object]) -> threading.Thread:
    """Call ``act`` in a thread as soon as the calling thread is inside one of these functions.

    The thread holds frames of its caller, and all that these refer to, until it has ended: see `end_watching`.
    """
    caller = threading.get_ident()

    def watch() -> None:
        pause = threading.Event()
        while (frame := sys._current_frames().get(caller)) is not None:
            while frame is not None:
                if frame.f_code.co_name in functions:
                    act()
                    return
                frame = frame.f_back
            pause.wait(0.001)

    thread = threading.Thread(target=watch, name=_WATCHER, daemon=True)
    thread.start()
    return thread


def end_watching() -> None:
    """Wait until all threads of `when_blocked_in` have acted, or their callers have ended."""
    for thread in threading.enumerate():
        if thread.name == _WATCHER:
            thread.join(WAIT_S)


def num_descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def num_threads() -> int:
    """Threads of this process, those of C++ included (Linux)."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()
