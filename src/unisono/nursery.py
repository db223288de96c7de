"""A process that has imported torch, and forks workers from there.

Importing torch takes a second or two of a core. Done once for all workers of a machine, four workers start in the time of one, a
replacement starts in milliseconds, and what was imported is shared memory. The nursery itself never computes
and has no thread of its own, so a fork copies a quiet process.

The agent starts it and speaks to it over a pair of sockets: `Birth` with the worker's output pipes attached, and back `Born` and
`Death`. It ends when its agent does, and its workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import Final

import msgspec

from unisono.lifetime import PARENT, bind_to_parent, end_group

__all__ = ["Birth", "Born", "Death", "main"]

MAX_BYTES: Final = 1 << 20


class Birth(msgspec.Struct, frozen=True, tag=True):
    """Start a worker. Its standard output and error are attached."""

    name: str
    arguments: list[str]
    """As after ``python -m unisono.worker``."""
    environment: dict[str, str]


class Born(msgspec.Struct, frozen=True, tag=True):
    """A worker was started, or not."""

    name: str
    pid: int
    error: str = ""


class Death(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended, and all processes of its group with it."""

    pid: int
    exit_code: int
    """Negative: killed by that signal."""


def main() -> int:
    """Be a nursery. In a child, be a worker. Returns the exit code of the process."""
    bind_to_parent(signal.SIGKILL)
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the agent decides when it ends
    # What every worker needs; the script's own imports find it there.
    import unisono.run
    import unisono.worker  # noqa: F401

    gc.collect()
    gc.freeze()
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(awake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    channel.sendall(msgspec.msgpack.encode(Born("", os.getpid())))
    while True:
        ready, _, _ = select.select([channel, awake], [], [])
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)
            _reap(channel)
        if channel in ready:
            data, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 4)
            if not data:
                return 0
            birth = msgspec.msgpack.decode(data, type=Birth)
            try:
                pid = os.fork()
            except OSError as error:
                channel.sendall(msgspec.msgpack.encode(Born(birth.name, 0, str(error))))
                pid = -1
            if pid == 0:
                channel.close()
                os.close(awake)
                signal.set_wakeup_fd(-1)
                os.close(waker)
                return _be_worker(birth, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            if pid > 0:
                channel.sendall(msgspec.msgpack.encode(Born(birth.name, pid)))


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        end_group(ended.si_pid)  # before its number can belong to somebody else
        _, status = os.waitpid(ended.si_pid, 0)
        channel.sendall(msgspec.msgpack.encode(Death(ended.si_pid, os.waitstatus_to_exitcode(status))))


def _be_worker(birth: Birth, descriptors: list[int]) -> int:
    """In the forked child: look like ``python -m unisono.worker ARGUMENTS`` that was just started."""
    nursery = os.getppid()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(birth.environment)
    os.environ[PARENT] = str(nursery)
    sys.argv = ["unisono.worker", *birth.arguments]
    from unisono.worker import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
