"""Holder: runs a command at the far end of a connection, and leaves nothing of it behind.

A launcher starts ``python -P -m unisono.machine.holder`` on another machine (by ssh), and keeps the holder's standard
input open. Its first line is an `Order`; what follows is passed on to the command. At the end of standard input the
launcher, the connection or the process that serves it is gone, whichever it was. Then, and at SIGTERM, SIGINT and
SIGHUP, the holder closes the command's standard input, so that the command ends by itself, and sends SIGTERM, then
SIGKILL, to all processes that the command has started. It does the same when the command has ended: the holder adopts
orphans, so it also finds what a script has started in a session of its own.

The command writes to the holder's standard output itself, so a lost connection cannot hold the holder up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from unisono.lifetime import PARENT, adopt_orphans, fill_standard_streams, name_process
from unisono.machine.descendants import end_descendants

__all__ = ["CANNOT_START", "Order", "main"]

CANNOT_START: Final = 127
"""The exit code where the command could not be started, as that of a shell."""

COMMAND_S: Final = 10.0  # for the command to end by itself; an agent ends its workers within 7 s
TERMINATE_S: Final = 3.0
MAX_ORDER_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Order:
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
        return _hold(child, rest, awake, asked)
    finally:
        end_descendants(TERMINATE_S)
        if locked is not None:
            os.close(locked)


def _read_order() -> tuple[Order | None, bytes]:
    """Return the order, and what has come after it; no order where the launcher is gone."""
    data = b""
    while b"\n" not in data:
        more = os.read(0, 65536)
        data += more
        if not more or len(data) > MAX_ORDER_BYTES:
            return None, b""
    line, _, rest = data.partition(b"\n")
    return Order(**json.loads(line)), rest


def _lock(path: str) -> int | None:
    """Lock a file as long as the returned descriptor is open."""
    if not path:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _hold(child: subprocess.Popen[bytes], data: bytes, awake: int, asked: Sequence[int]) -> int:
    """Pass on standard input until its end or a signal, then wait for the command; return its exit code."""
    assert child.stdin is not None
    command = child.stdin.fileno()
    os.set_blocking(command, False)
    sources, deadline = [0, awake], float("inf")
    while True:
        code = child.poll()
        if code is not None or time.monotonic() >= deadline:
            return 1 if code is None else code if code >= 0 else 128 - code
        try:
            if data:
                data = data[os.write(command, data) :]
        except BlockingIOError:
            pass
        except OSError:  # the command reads no more
            data = b""
        if asked and 0 in sources:
            sources.remove(0)
        if 0 not in sources and deadline == float("inf"):
            deadline = time.monotonic() + COMMAND_S
            with contextlib.suppress(OSError):
                child.stdin.close()
            data = b""
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(sources, [command] if data else [], [], left)
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)
        if 0 in ready:
            more = os.read(0, 65536)
            data += more
            if not more:
                sources.remove(0)


if __name__ == "__main__":
    sys.exit(main())
