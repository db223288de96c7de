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
from typing import Final

import msgspec

from unisono.errors import UsageError
from unisono.lifetime import Memory, end_group
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
    loop = asyncio.get_running_loop()

    def reap() -> None:
        # Its group is ended before it is reaped: until then its number belongs to nobody else.
        end_group(popen.pid)
        child.end(popen.wait())

    try:
        pidfd = os.pidfd_open(popen.pid)
    except (AttributeError, OSError):

        def wait() -> None:
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(reap)

        threading.Thread(target=wait, name=f"wait-{name}", daemon=True).start()
        return child

    def readable() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        reap()

    loop.add_reader(pidfd, readable)
    return child


class Nursery:
    """The process that forks workers (`unisono.machine.nursery`)."""

    def __init__(self, environment: Mapping[str, str], secret: Memory, standing: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self.child: Child | None = None
        """Its process; None where it was there before."""
        self.on_end: Callable[[str], None] = lambda words: None
        """Hears that it has ended by itself, before its workers' ends are told."""
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
        (out, out_end), (error, error_end) = os.pipe(), os.pipe()

        def born(message: Born) -> None:
            if message.error:
                os.close(out)
                os.close(error)
                on_born(message.error)
                return
            child = self._children[message.pid] = Child(name, message.pid, Output((out, error)))
            on_born(child)

        self._unborn[name] = born
        birth = Birth.of(name, arguments, environment, os.getcwd())
        try:
            # A few bytes, to a process that does nothing else.
            self._channel.settimeout(SEND_TIMEOUT_S)
            birth.send(self._channel, [out_end, error_end, self._secret.descriptor])
        except OSError as failure:
            self._unborn.pop(name)(Born(name, 0, f"the nursery does not answer: {failure}"))
        finally:
            self._channel.setblocking(False)
            os.close(out_end)
            os.close(error_end)

    async def close(self) -> None:
        """End it; its workers have ended before."""
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self.child is not None and not await self.child.ended_within(TERMINATE_S):
            self.child.kill()
            await self.child.ended_within(TERMINATE_S)

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
                self.on_end(f"the nursery{pid}, which forks workers, has ended; its workers end with it")
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
