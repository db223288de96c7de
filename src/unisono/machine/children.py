"""Processes that an agent has started: their output line by line, their end at once, and that they end at all.

A child leads a process group of its own, so what it starts can be ended with it. It comes from `spawn`, by its
command, or from a `Nursery`, which forks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from unisono.errors import UsageError
from unisono.lifetime import Memory, adopt_orphans, end_group
from unisono.machine.nursery import Birth, Born, Death

__all__ = ["TERMINATE_S", "Child", "Nursery", "Output", "spawn"]

LAST_LINES: Final = 20
MAX_LINE_BYTES: Final = 65536
PIPE_BYTES: Final = 1 << 20  # the most that a pipe holds
SEND_TIMEOUT_S: Final = 5.0
TERMINATE_S: Final = 3.0  # from SIGTERM to SIGKILL


class Output:
    """The standard output and error of a process of ours, line by line."""

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self.on_line: Callable[[str, bool], None] = lambda text, is_error: None
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._loop = asyncio.get_running_loop()
        self._out, self._error = descriptors
        self._rest = {descriptor: bytearray() for descriptor in descriptors}
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)

    def drain(self) -> None:
        """Read what is left, and close.

        What a process of another group goes on writing is not waited for: it loses its reader.
        """
        for descriptor in list(self._rest):
            left = PIPE_BYTES
            while left > 0 and (num_bytes := self._read(descriptor)):
                left -= num_bytes
        for descriptor in list(self._rest):
            self._close(descriptor)

    def _read(self, descriptor: int) -> int:
        """Returns how many bytes there were."""
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
        # Of a line that was drawn over and over ("\r") only the last state counts.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        is_error = descriptor == self._error
        if is_error:
            self.last_lines.append(text)
        self.on_line(text, is_error)

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        rest = self._rest.pop(descriptor)
        if rest:
            self._line(descriptor, bytes(rest))
        os.close(descriptor)


class Child:
    """A process that leads a group of its own, its output and its end. Made by `spawn` or by the `Nursery`."""

    def __init__(self, name: str, pid: int, output: Output) -> None:
        self.name = name
        self.pid = pid
        self.output = output
        self.on_end: Callable[[Child], None] = lambda child: None
        self.exit_code: int | None = None
        self._ended = asyncio.Event()

    def end(self, exit_code: int) -> None:
        """It has ended, and its group with it."""
        self.exit_code = exit_code
        self.output.drain()
        self.on_end(self)
        self._ended.set()

    def signal_group(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            end_group(self.pid, number)

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)

    async def ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


def spawn(name: str, command: list[str], environment: Mapping[str, str], pass_fds: tuple[int, ...]) -> Child:
    """Start a process by its command."""
    (out, out_end), (error, error_end) = os.pipe(), os.pipe()
    try:
        popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out_end,
            stderr=error_end,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError:
        os.close(out)
        os.close(error)
        raise
    finally:
        os.close(out_end)
        os.close(error_end)
    child = Child(name, popen.pid, Output((out, error)))
    _watch(child, popen.wait)
    return child


_reapers: dict[int, Callable[[], None]] = {}  # by process id, of the children that are watched


def _watch(child: Child, wait: Callable[[], int]) -> None:
    """Let a child of this process have its `Child.end` as soon as it has ended; ``wait`` reaps it for its exit code."""
    loop = asyncio.get_running_loop()
    pid = child.pid
    pidfd = -1

    def reap() -> None:
        if _reapers.pop(pid, None) is None:
            return
        if pidfd >= 0:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        # Its group is ended before it is reaped: until then its number belongs to nobody else.
        end_group(pid)
        child.end(wait())

    _reapers[pid] = reap
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):

        def block() -> None:
            with contextlib.suppress(ChildProcessError):  # it was reaped meanwhile
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(reap)

        threading.Thread(target=block, name=f"wait-{child.name}", daemon=True).start()
    else:
        loop.add_reader(pidfd, reap)


def _reap_all() -> None:
    """Reap every child that has ended: workers, and what their scripts have left to this process, which adopts it."""
    with contextlib.suppress(ChildProcessError):  # there is none at all
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            known = _reapers.get(ended.si_pid)
            if known is not None:
                known()
            else:
                os.waitpid(ended.si_pid, 0)


def _exit_code(pid: int) -> int:
    """Reap a child that has ended."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # somebody has killed it before this process knew that it is its child
        return -signal.SIGKILL


class Nursery:
    """The process that forks workers (`unisono.machine.nursery`), which are this process's children if that can be.

    Args:
        standing: where one listens that was there before; "": start one.
    """

    def __init__(self, environment: Mapping[str, str], secret: Memory, standing: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self.child: Child | None = None
        """Its process; None where it was there before."""
        self.on_end: Callable[[str], None] = lambda words: None
        """Hears that it has ended by itself, before the ends of workers are told that end with it."""
        self._adopts = not standing and adopt_orphans(True)
        if self._adopts:
            self._loop.add_signal_handler(signal.SIGCHLD, _reap_all)
        if standing:
            self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._channel.connect(standing)
            except OSError as error:
                raise UsageError(f"no nursery answers at UNISONO_NURSERY={standing}: {error.strerror}") from error
        else:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-u", "-P", "-m", "unisono.machine.nursery", str(theirs.fileno())]
            try:
                self.child = spawn("nursery", command, environment, (theirs.fileno(),))
            finally:
                theirs.close()
        self._channel.setblocking(False)
        self._alive = True
        self._children: dict[int, Child] = {}
        self._unborn: dict[str, Callable[[Born], None]] = {}
        self._loop.add_reader(self._channel.fileno(), self._hear)

    @property
    def alive(self) -> bool:
        return self._alive

    def bear(
        self, name: str, arguments: list[str], environment: Mapping[str, str], on_born: Callable[[Child | str], None]
    ) -> None:
        """Start a worker; ``on_born`` gets it, or the reason why there is none."""
        (out, out_end), (error, error_end), (gate, key) = os.pipe(), os.pipe(), os.pipe()

        def born(message: Born) -> None:
            if message.error:
                for descriptor in (out, error, key):
                    os.close(descriptor)
                on_born(message.error)
                return
            child = Child(name, message.pid, Output((out, error)))
            if self._adopts:
                _watch(child, partial(_exit_code, message.pid))
            else:
                self._children[message.pid] = child
            with contextlib.suppress(BrokenPipeError):  # it was killed
                os.write(key, b"1")
            os.close(key)
            on_born(child)

        self._unborn[name] = born
        birth = Birth.of(name, arguments, environment, os.getcwd(), adopted=self._adopts)
        try:
            # A few bytes, to a process that does nothing else.
            self._channel.settimeout(SEND_TIMEOUT_S)
            birth.send(self._channel, [out_end, error_end, self._secret.descriptor, gate])
        except OSError as failure:
            self._unborn.pop(name)(Born(name, 0, f"the nursery does not answer: {failure}"))
        finally:
            self._channel.setblocking(False)
            for descriptor in (out_end, error_end, gate):
                os.close(descriptor)

    async def close(self) -> None:
        """End it; its workers have ended before."""
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self.child is not None and not await self.child.ended_within(TERMINATE_S):
            self.child.kill()
            await self.child.ended_within(TERMINATE_S)
        if self._adopts:
            self._loop.remove_signal_handler(signal.SIGCHLD)
            adopt_orphans(False)

    def _hear(self) -> None:
        while True:
            try:
                data = self._channel.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._alive = False
                self._loop.remove_reader(self._channel.fileno())
                pid = f" (pid {self.child.pid})" if self.child is not None else ""
                what = "they go on, and others start each by itself" if self._adopts else "they end with it"
                self.on_end(f"the nursery{pid}, which forks workers, has ended; {what}")
                for name, born in list(self._unborn.items()):
                    born(Born(name, 0, "the nursery has ended"))
                self._unborn.clear()
                for child in self._children.values():
                    if child.exit_code is None:  # they go with their parent, and what they have started with them
                        end_group(child.pid)
                        child.end(-signal.SIGKILL)
                return
            message = msgspec.msgpack.decode(data, type=Born | Death)
            if isinstance(message, Death):
                self._children.pop(message.pid).end(message.exit_code)
            elif message.name:
                self._unborn.pop(message.name)(message)
