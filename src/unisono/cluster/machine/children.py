"""Child processes of an agent: their output line by line, and their end as soon as it happens.

Every process that an agent starts is a `Child`, which the event loop owns. `spawn` starts a child by its command: the
head, the nursery, evaluators, the local ends of agents on other machines. The nursery forks a child
(`unisono.cluster.machine.placement`). A child leads a process group of its own, so the processes that it starts can be
ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Final, Protocol

from unisono.system.lifetime import end_group, tied

__all__ = [
    "MAX_LINE_BYTES",
    "NOT_STARTED",
    "TERMINATE_S",
    "Child",
    "Listener",
    "Output",
    "exit_code_of",
    "reap_all",
    "spawn",
    "watch",
]

LAST_LINES: Final = 20
MORE_LINES: Final = 120
MAX_LINE_BYTES: Final = 65536
PIPE_BYTES: Final = 1 << 20  # the most that a pipe holds
NOT_STARTED: Final = "could not be started: {}; see the limits of processes, open files and memory (ulimit -a)"
TERMINATE_S: Final = 3.0  # from SIGTERM to SIGKILL


class Listener(Protocol):
    """Receives what the processes of a run print, and sentences about them."""

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        """Receive one line of the output of process ``name``."""

    def on_notice(self, text: str) -> None:
        """Receive a sentence for the user."""


class Output:
    """Standard output and error of a child.

    Args:
        descriptors: the pipes of its standard output and of its standard error, or one pipe for both.
        on_line: is called with every line, and whether it comes from standard error.
    """

    def __init__(self, descriptors: tuple[int, ...], on_line: Callable[[str, bool], None]) -> None:
        self._on_line = on_line
        self.more_lines: deque[str] = deque(maxlen=MORE_LINES)
        """The last lines of its standard error."""
        self._loop = asyncio.get_running_loop()
        self._error = descriptors[1] if len(descriptors) > 1 else None
        self._rest = {descriptor: bytearray() for descriptor in descriptors}
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)

    @property
    def last_lines(self) -> list[str]:
        """Its very last lines, as an announcement shows them."""
        return list(self.more_lines)[-LAST_LINES:]

    def drain(self) -> None:
        """Read the rest, and close the pipes.

        A process of another group that still writes is not waited for, and loses its reader.
        """
        for descriptor in list(self._rest):
            left = PIPE_BYTES
            while left > 0 and (num_bytes := self._read(descriptor)):
                left -= num_bytes
        for descriptor in list(self._rest):
            self._close(descriptor)

    def _read(self, descriptor: int) -> int:
        """Read once; return how many bytes there were."""
        if descriptor not in self._rest:
            return 0
        try:
            data = os.read(descriptor, MAX_LINE_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._close(descriptor)
            return 0
        *lines, tail = (self._rest[descriptor] + data).split(b"\n")
        if len(tail) > MAX_LINE_BYTES:
            lines.append(tail)
            tail = bytearray()
        self._rest[descriptor] = bytearray(tail)
        for line in lines:
            self._line(descriptor, bytes(line))
        return len(data)

    def _line(self, descriptor: int, line: bytes) -> None:
        # Of a line that was redrawn with "\r" only the last state counts.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        is_error = descriptor == self._error
        if is_error:
            self.more_lines.append(text)
        self._on_line(text, is_error)

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        rest = self._rest.pop(descriptor)
        if rest:
            self._line(descriptor, bytes(rest))
        os.close(descriptor)


class Child:
    """A process that leads a group of its own, with its output.

    Args:
        on_end: is called when the process has ended and its output is read.
        keeps_group: the processes that it leaves behind go on.
    """

    def __init__(
        self, name: str, pid: int, output: Output, on_end: Callable[[Child], None], *, keeps_group: bool = False
    ) -> None:
        self.name = name
        self.pid = pid
        self.output = output
        self.exit_code: int | None = None
        """None while it runs; negative: killed by that signal."""
        self.peak_bytes = 0
        """The most memory that it had, once it has ended; 0: unknown."""
        self.is_killed = False
        """This process has killed it."""
        self.keeps_group = keeps_group
        self.stdin: IO[bytes] | None = None
        """Its standard input, if that was kept open (`spawn`)."""
        self._on_end = on_end
        self._ended = asyncio.Event()

    def end(self, exit_code: int) -> None:
        """Note that the process has ended, and its group with it."""
        self.exit_code = exit_code
        self.close_input()
        self.output.drain()
        self._on_end(self)
        self._ended.set()

    def write(self, text: str) -> None:
        """Write to its standard input, if that was kept open: what fits into a pipe."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended: its exit code says so
                self.stdin.write(text.encode())
                self.stdin.flush()

    def close_input(self) -> None:
        """End its standard input."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()

    def signal_group(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            end_group(self.pid, number)

    def kill(self) -> None:
        self.is_killed = True
        self.signal_group(signal.SIGKILL)

    async def ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, ask: signal.Signals | None = signal.SIGTERM) -> None:
        """End the process with its group: ask it, wait `TERMINATE_S`, kill it.

        Args:
            ask: the signal; None: it was asked in another way, or is not to be asked.
        """
        if ask is not None:
            self.signal_group(ask)
        if not await self.ended_within(TERMINATE_S):
            self.kill()
            await self.ended_within(TERMINATE_S)


def _ignore(*_: object) -> None:
    pass


def spawn(
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    pass_fds: tuple[int, ...],
    *,
    on_line: Callable[[str, bool], None] = _ignore,
    on_end: Callable[[Child], None] = _ignore,
    is_tied: bool = False,
    given: str | None = None,
    is_together: bool = False,
    keeps_group: bool = False,
) -> Child:
    """Start a process by its command.

    Args:
        is_tied: the program does not see to it by itself that it ends with this process
            (`unisono.system.lifetime.tied`).
        given: the beginning of its standard input, which stays open (`Child.close_input`); None: it has none.
        is_together: its standard output and error have one pipe.
        keeps_group: of `Child`.

    Raises:
        OSError: it cannot be started.
    """
    pipes = [os.pipe() for _ in range(1 if is_together else 2)]
    pipe, tie = os.pipe() if is_tied else (-1, -1)
    try:
        popen = subprocess.Popen(
            tied(command, pipe) if is_tied else command,
            env=environment,
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=pipes[0][1],
            stderr=pipes[-1][1],
            pass_fds=(*pass_fds, pipe) if is_tied else pass_fds,
            start_new_session=True,
        )
    except OSError:
        for reader, _ in pipes:
            os.close(reader)
        if is_tied:
            os.close(tie)
        raise
    finally:
        for _, writer in pipes:
            os.close(writer)
        if is_tied:
            os.close(pipe)
    shown = Output(tuple(reader for reader, _ in pipes), on_line)
    child = Child(name, popen.pid, shown, on_end, keeps_group=keeps_group)
    if popen.stdin is not None and given is not None:
        child.stdin = popen.stdin
        child.write(given)

    def wait() -> int:
        if is_tied:
            os.close(tie)
        popen.returncode = exit_code_of(popen.pid)  # so that the object does not wait for it
        return popen.returncode

    watch(child, wait)
    return child


_reapers: dict[int, Callable[[], None]] = {}  # by process id of a watched child
_peaks: dict[int, int] = {}  # by process id of a child that was reaped a moment ago, the most memory that it had


def watch(child: Child, wait: Callable[[], int]) -> None:
    """Call `Child.end` of a child of this process as soon as the process has ended.

    Args:
        wait: reaps the process; returns its exit code.
    """
    loop = asyncio.get_running_loop()
    pid = child.pid
    pidfd = -1

    def reap() -> None:
        if _reapers.pop(pid, None) is None:
            return
        if pidfd >= 0:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        # End the group before the process is reaped: until then its number belongs to no other group.
        if not child.keeps_group:
            end_group(pid)
        exit_code = wait()
        child.peak_bytes = _peaks.pop(pid, 0)
        child.end(exit_code)

    _reapers[pid] = reap
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):

        def block() -> None:
            _wait_unreaped(pid)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(reap)

        threading.Thread(target=block, name=f"wait-{child.name}", daemon=True).start()
    else:
        loop.add_reader(pidfd, reap)


def _wait_unreaped(pid: int) -> None:
    """Block until a child of this process has ended; it is still to be reaped."""
    if sys.platform == "darwin":  # has os.waitid from Python 3.13 on
        with contextlib.suppress(OSError):  # it has ended already
            ended = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            select.kqueue().control([ended], 1)
        return
    with contextlib.suppress(ChildProcessError):  # it was reaped meanwhile
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def reap_all() -> None:
    """Reap every child that has ended: workers, and orphans of their scripts, which this process adopts."""
    with contextlib.suppress(ChildProcessError):  # there is none at all
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            known = _reapers.get(ended.si_pid)
            if known is not None:
                known()
            else:
                os.waitpid(ended.si_pid, 0)


def exit_code_of(pid: int) -> int:
    """Reap a child that has ended; return its exit code."""
    try:
        _, status, used = os.wait4(pid, 0)
        _peaks[pid] = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return os.waitstatus_to_exitcode(status)
    except ChildProcessError:  # the child was killed and reaped before this process knew it
        return -signal.SIGKILL
