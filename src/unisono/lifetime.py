"""Nothing outlives what started it, and no connection outlives the path that carries it.

A child of the command dies with it, also after ``kill -9``: on Linux the kernel is asked to send a signal when the
parent's thread ends (``PR_SET_PDEATHSIG``); elsewhere the child looks for itself (`parent_is_gone`). The token is
handed down in memory that has no name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

__all__ = [
    "PARENT",
    "SILENCE_S",
    "TOKEN_FILE",
    "Memory",
    "adopt_orphans",
    "bind_to_parent",
    "end_group",
    "end_when_silent",
    "fill_standard_streams",
    "name_process",
    "parent_is_gone",
    "start_time",
    "take_token",
]

PARENT: Final = "UNISONO_PARENT"
"""The environment variable with the process id of who started this process, and is to be survived by nobody."""

TOKEN_FILE: Final = "UNISONO_TOKEN_FILE"
"""The environment variable with the place of the run's token, for a process that is handed it (`take_token`)."""

SILENCE_S: Final = 5
"""How long the other end of a connection may not even acknowledge."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_parent: int | None = None


def bind_to_parent(number: signal.Signals) -> None:
    """Let this process get signal ``number`` when the process named in `PARENT` ends; exit if it has already.

    Does nothing where the variable is missing. The parent must have started this process from a thread that lives
    as long as itself.
    """
    global _parent
    value = os.environ.pop(PARENT, "")
    if not value.isdecimal():
        return
    _parent = int(value)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent_is_gone():  # it ended before the line above
        os._exit(1)


def adopt_orphans(yes: bool) -> bool:
    """Let descendants of this process become its children when their parent ends; whether the system does that.

    They are to be waited for like its own.
    """
    if sys.platform != "linux":
        return False
    failed = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
    return not failed


def parent_is_gone() -> bool:
    """Whether the process that `bind_to_parent` has found is no longer this one's parent."""
    return _parent is not None and os.getppid() != _parent


def end_group(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to all processes of a group that this program has made; nothing happens if it is empty."""
    if leader > 1 and leader != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def start_time(pid: int) -> str:
    """When a process began: together with its number, which may be used again, it is the process's name.

    "" for one that is gone, and where the system does not tell.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def end_when_silent(connection: socket.socket) -> None:
    """Let a TCP connection break when the other machine has not acknowledged anything for `SILENCE_S`.

    The kernels see to it: a process that is busy does not count as silent, a machine without power and a cut cable do.
    Without this, whoever waits for a message would wait for ever.

    Between two processes of one machine no path can break, and one of them that does not read for a while (Ctrl-Z) must
    not count: to the kernel, which can then not deliver what was sent, it looks like a silent machine.
    """
    with contextlib.suppress(OSError):
        if connection.getsockname()[:1] == connection.getpeername()[:1]:
            return
    settings = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPALIVE": 1,  # the same on macOS
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENCE_S - 1,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,  # of what was sent
    }
    with contextlib.suppress(OSError):  # not a TCP connection, or a system without these
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in settings.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def fill_standard_streams() -> None:
    """Open ``/dev/null`` where standard input, output or error were closed by whoever started this process.

    Otherwise the next socket gets such a number, and a child finds its standard input in the socket's place.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def name_process(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show. Only on Linux; at most 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


class Memory:
    """Bytes that other processes of this user can reach, as long as this process has them open.

    On Linux they have no name in any directory, so nothing of them is left, however this process ends. Close them at
    the end.
    """

    def __init__(self, name: str, data: bytes = b"") -> None:
        if sys.platform == "linux":
            self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
            """For whoever knows it."""
            self.inherited_path = f"/proc/self/fd/{self.descriptor}"
            """For those to whom ``descriptor`` was passed on (``pass_fds``), and for nobody else."""
        else:
            self.descriptor, self.path = tempfile.mkstemp(prefix=f"{name}-")  # mode 600
            self.inherited_path = self.path
        Path(self.path).write_bytes(data)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self) -> bytes:
        return Path(self.path).read_bytes()

    def close(self) -> None:
        os.close(self.descriptor)
        if sys.platform != "linux":
            os.unlink(self.path)


def take_token(environment: MutableMapping[str, str]) -> str:
    """The run's token, which was handed down to this process; its children find neither the memory nor its name.

    Raises:
        KeyError: nothing was handed down. OSError, ValueError: it cannot be read.
    """
    path = environment.pop(TOKEN_FILE)
    token = Path(path).read_text().strip()
    folder, _, name = path.rpartition("/")
    if folder == "/proc/self/fd":
        os.close(int(name))
    return token
