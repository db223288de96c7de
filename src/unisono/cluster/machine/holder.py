"""Holder: runs a command at the far end of a connection, and leaves nothing of it behind.

A launcher starts ``python -P -m unisono.cluster.machine.holder`` on another machine (by ssh), and keeps the holder's
standard input open. Its first line is a `HolderOrder`; what follows goes to the command. At the end of standard
input the launcher, the connection or the process that serves it is gone:

- The process that serves the connection lives: the launcher has ended, or was killed. The holder closes the command's
  standard input, so that the command ends by itself.
- It has ended as well: the connection is lost, and maybe the launcher's machine. The holder says so to the command
  (`LOST`). A command that is to go on without its launcher closes its standard input.

A command that has done neither after `COMMAND_S` is ended: SIGTERM, then SIGKILL, to all processes that it has started.
So are those that are left when the command has ended: the holder adopts orphans, so it also finds what a script has
started in a session of its own. SIGTERM, SIGINT and SIGHUP to the holder count as the end of the launcher.

The command writes to the holder's standard output itself, so a lost connection cannot hold the holder up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from unisono.system.descendants import end_descendants
from unisono.system.lifetime import PARENT, adopt_orphans, fill_standard_streams, name_process

__all__ = ["CANNOT_START", "LOST", "HolderOrder", "main"]

LOST: Final = b"lost\n"
"""What the command reads when the connection to its launcher is lost."""

CANNOT_START: Final = 127
"""The exit code where the command could not be started, as that of a shell."""

COMMAND_S: Final = 10.0  # for the command to end by itself; an agent ends its workers within 7 s
TERMINATE_S: Final = 3.0
LOSE_S: Final = 1.0  # from the end of standard input to the end of the process that serves a lost connection
LOOK_AGAIN_S: Final = 0.1
MAX_ORDER_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class HolderOrder:
    """What a holder runs."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the holder."""
    lock: str = ""
    """A file that is locked (shared) as long as the command runs: the folder that it lies in is in use."""

    def encode(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self))


def main() -> int:
    """Be a holder. Returns the exit code of the command; 128 + N where signal N has killed it."""
    fill_standard_streams()
    name_process("unisono holder")
    awake, waker = os.pipe()
    for descriptor in (awake, waker):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: asked.append(received))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    order, rest = _read_order()
    if order is None:
        return 1
    adopt_orphans(True)
    server = _server()
    locked = _lock(order.lock)
    try:
        child = subprocess.Popen(
            order.words,
            stdin=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **order.environment, PARENT: str(os.getpid())},
            start_new_session=True,
        )
    except OSError as error:
        print(f"{order.words[0]} cannot be started: {error.strerror}", flush=True)
        return CANNOT_START
    try:
        return _hold(child, rest, awake, asked, server)
    finally:
        end_descendants(TERMINATE_S)
        if locked is not None:
            os.close(locked)


def _read_order() -> tuple[HolderOrder | None, bytes]:
    """Return the order, and what has come after it; no order where the launcher is gone."""
    data = b""
    while b"\n" not in data:
        more = os.read(0, 65536)
        data += more
        if not more or len(data) > MAX_ORDER_BYTES:
            return None, b""
    line, _, rest = data.partition(b"\n")
    return HolderOrder(**json.loads(line)), rest


def _server() -> int:
    """Return a descriptor of the process that serves the connection: this one's parent; -1: it cannot be watched."""
    with contextlib.suppress(OSError, AttributeError):  # its parent lives in another namespace; an old system
        return os.pidfd_open(os.getppid())
    return -1


def _lock(path: str) -> int | None:
    """Lock a file as long as the returned descriptor is open."""
    if not path:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


class _Held:
    """The command that a holder runs."""

    def __init__(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        assert child.stdin is not None
        self._child = child
        self._pipe = child.stdin
        self._data = data
        os.set_blocking(child.stdin.fileno(), False)
        self.deadline = math.inf
        """When it is ended if it still runs."""

    @property
    def wants_to_write(self) -> list[int]:
        return [self._pipe.fileno()] if self._data else []

    def pass_on(self, data: bytes = b"") -> None:
        """Write to its standard input what fits."""
        self._data += data
        try:
            if self._data:
                self._data = self._data[os.write(self._pipe.fileno(), self._data) :]
        except BlockingIOError:
            pass
        except OSError:  # it reads no more
            self._data = b""

    def end(self) -> None:
        """Ask it to end."""
        self.deadline = min(self.deadline, time.monotonic() + COMMAND_S)
        self._data = b""
        with contextlib.suppress(OSError):
            self._pipe.close()

    def lose(self) -> None:
        """Tell it that the connection is lost; it ends, or closes its standard input and goes on."""
        self.deadline = time.monotonic() + COMMAND_S
        self.pass_on(LOST)

    def _goes_on(self) -> bool:
        """Return whether it has closed its standard input after `lose`."""
        if self._pipe.closed or self.deadline == math.inf:
            return False
        watch = select.poll()
        watch.register(self._pipe.fileno(), 0)  # errors only
        return bool(watch.poll(0))

    def exit_code(self) -> int | None:
        """Return its exit code; 1 after the deadline; None as long as it may run."""
        if self._goes_on():
            self.deadline = math.inf
        code = self._child.poll()
        if code is None:
            return 1 if time.monotonic() >= self.deadline else None
        return code if code >= 0 else 128 - code


def _hold(child: subprocess.Popen[bytes], data: bytes, awake: int, asked: Sequence[int], server: int) -> int:
    """Pass on standard input until its end or a signal, then wait for the command; return its exit code.

    Args:
        server: a descriptor of the process that serves the connection; -1: it counts as living.
    """
    held = _Held(child, data)
    sources = [0, awake]
    is_asked = False
    while (code := held.exit_code()) is None:
        held.pass_on()
        if asked and not is_asked:
            is_asked = True
            held.end()
        left = min(held.deadline - time.monotonic(), LOOK_AGAIN_S) if held.deadline < math.inf else None
        ready, _, _ = select.select(sources, held.wants_to_write, [], left if left is None else max(0.0, left))
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)
        if 0 in ready and 0 in sources:
            if more := os.read(0, 65536):
                held.pass_on(more)
                continue
            sources.remove(0)
            if is_asked:
                continue
            if server >= 0 and select.select([server], [], [], LOSE_S)[0]:
                held.lose()
            else:
                held.end()
    return code


if __name__ == "__main__":
    sys.exit(main())
