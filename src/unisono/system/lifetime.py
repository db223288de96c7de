"""No process outlives its parent, and no connection outlives the network path that carries it.

A child of the command ends with the command, also after ``kill -9``. On Linux the kernel sends the child a signal when
the thread that started it ends (``PR_SET_PDEATHSIG``); elsewhere the child checks by itself (`parent_is_gone`). The
token is handed to children in memory that has no name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

__all__ = [
    "NURSERY",
    "PARENT",
    "SILENCE_S",
    "TOKEN_FILE",
    "Done",
    "Memory",
    "adopt_orphans",
    "bind_to_parent",
    "close_inherited",
    "end_group",
    "end_when_silent",
    "fill_standard_streams",
    "name_process",
    "parent_is_gone",
    "raise_file_limit",
    "run_bound",
    "scratch_folder",
    "start_time",
    "started",
    "take_inherited",
    "take_token",
    "tied",
]

PARENT: Final = "UNISONO_PARENT"
"""The environment variable with the process id of the parent, with which this process is to end."""

TOKEN_FILE: Final = "UNISONO_TOKEN_FILE"
"""The environment variable with the path of the run's token, for a process that may have it (`take_token`)."""

NURSERY: Final = "UNISONO_NURSERY"
"""The environment variable with the socket of a nursery that stands by itself: workers are forked from it."""

SILENCE_S: Final = 5
"""A connection breaks when the other end has acknowledged nothing for so many seconds."""

_TIED: Final = '{ cat <"$0"; kill -9 0; } </dev/null >/dev/null 2>&1 & exec "$@"'

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_parent: int | None = None


def bind_to_parent(number: signal.Signals) -> None:
    """Have the kernel send this process signal ``number`` when the parent named in `PARENT` ends.

    Exits at once if the parent has ended already. Does nothing if the variable is missing. The parent must have started
    this process from a thread that lives as long as the parent.
    """
    global _parent
    value = os.environ.pop(PARENT, "")
    if not value.isdecimal():
        return
    _parent = int(value)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent_is_gone():  # the parent ended before the line above
        os._exit(1)


def tied(command: Sequence[str], pipe: int) -> list[str]:
    """Return a command that runs this one, and ends with a pipe: for programs that do not know `PARENT`.

    Start it as the leader of a process group, and let it inherit the reading end. When the other end is closed, be it
    by ``kill -9`` of the process that holds it, all processes of the group are killed.
    """
    return ["sh", "-c", _TIED, f"/dev/fd/{pipe}", *command]


class Done(NamedTuple):
    """A command that `run_bound` has run."""

    code: int | None
    """Its exit code; negative: killed by that signal; None: it was killed because it took too long."""
    data: bytes
    """Its standard output."""
    errors: str

    @property
    def output(self) -> str:
        return self.data.decode(errors="replace")


def run_bound(
    command: Sequence[str],
    limit_s: float,
    *,
    given: bytes | IO[bytes] = b"",
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run a command of others, and wait for its end. What it starts ends with it, at the limit, and with this process.

    Args:
        given: its standard input.
        environment: None: that of this process.

    Raises:
        OSError: there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    reader, tie = os.pipe()
    try:
        process = subprocess.Popen(
            tied(command, reader),
            stdin=subprocess.PIPE if isinstance(given, bytes) else given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(reader,),
            start_new_session=True,
            env=environment,
        )
    except OSError:
        os.close(tie)
        raise
    finally:
        os.close(reader)
    code: int | None = None
    with process:
        try:
            data, errors = process.communicate(given if isinstance(given, bytes) else None, timeout=limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            end_group(process.pid)
            data, errors = process.communicate()
        finally:
            os.close(tie)
    return Done(code, data, errors.decode(errors="replace"))


@contextlib.contextmanager
def started(
    command: Sequence[str | Path], patience_s: float = 0.0, *, environment: Mapping[str, str], **popen: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Start a command of this program, which ends with this process (`bind_to_parent`), and at the end of the context.

    Args:
        patience_s: from SIGTERM to SIGKILL, where it still runs at the end of the context.
        environment: of the command; `PARENT` is added.
        popen: further arguments of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    with subprocess.Popen(command, env={**environment, PARENT: str(os.getpid())}, **popen) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
                process.kill()


def adopt_orphans(yes: bool) -> bool:
    """Make descendants of this process its children when their own parent ends; return whether the system can do that.

    This process must then wait for them as for its own children.
    """
    if sys.platform != "linux":
        return False
    failed = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
    return not failed


def parent_is_gone() -> bool:
    """Return whether the parent that `bind_to_parent` has noted has ended."""
    return _parent is not None and os.getppid() != _parent


def end_group(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to all processes of a process group that this program has made. An empty group is no error."""
    if leader > 1 and leader != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def start_time(pid: int) -> str:
    """Return when a process began; with its id, which the system may use again, this identifies the process.

    "" if the process is gone, or the system does not say.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def end_when_silent(connection: socket.socket) -> None:
    """Make a TCP connection break when the other machine has acknowledged nothing for `SILENCE_S`.

    The kernels acknowledge, so a busy process is not silent; a machine without power, or behind a cut cable, is.
    Without this setting a process would wait for ever for a message from such a machine.

    Connections within one machine are left alone: no cable can be cut there, and a process that does not read for a
    while (Ctrl-Z) would look silent, because the kernel cannot deliver to it.
    """
    with contextlib.suppress(OSError):
        if connection.getsockname()[:1] == connection.getpeername()[:1]:
            return
    settings = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPALIVE": 1,  # the same on macOS
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENCE_S - 1,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,  # milliseconds, for data that was sent
    }
    with contextlib.suppress(OSError):  # not a TCP connection, or a system without these settings
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in settings.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def raise_file_limit() -> None:
    """Let this process open as many files as the system lets it: the usual limit is 1,024, connections included."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fill_standard_streams() -> None:
    """Open ``/dev/null`` as standard input, output or error, where the parent has closed them.

    Otherwise the next socket would get the number of a standard stream, and a child would write into that socket.
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
    """Set the name that ``ps -o comm`` and ``top`` show. Only on Linux; at most 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


class Memory:
    """Bytes that other processes of this user can read, as long as this process has them open.

    On Linux they have no name in any directory, so nothing of them stays behind, however this process ends. Close them
    at the end.
    """

    def __init__(self, name: str, data: bytes = b"") -> None:
        if sys.platform == "linux":
            self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
            """The path for other processes."""
            self.inherited_path = f"/proc/self/fd/{self.descriptor}"
            """The path for children that inherit ``descriptor`` (``pass_fds``)."""
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
    """Return the run's token that the parent has handed to this process, and hide it from this process's children.

    Raises:
        KeyError: the parent has handed down no token. OSError, ValueError: the token cannot be read.
    """
    path = environment.pop(TOKEN_FILE)
    token = Path(path).read_text().strip()
    close_inherited(path)
    return token


def take_inherited(descriptor: str) -> bytes:
    """Return what the parent has handed down in a `Memory`, and close it. No list of processes shows it, and it may be
    longer than an argument or a variable (128 KiB).

    Args:
        descriptor: the number of `Memory.descriptor`, as an argument or a variable says it.

    Raises:
        OSError, ValueError: this is no such number.
    """
    with open(int(descriptor), "rb") as memory:
        return memory.read()


def close_inherited(path: str) -> None:
    """Close what this process has inherited under `Memory.inherited_path`, so that its own children do not."""
    folder, _, name = path.rpartition("/")
    if folder == "/proc/self/fd":
        os.close(int(name))


SWEEP: Final = (
    'trap "" TERM; cat > /dev/null; for n in 1 2 3 4 5; do [ -e "$0" ] || exit 0; rm -rf -- "$0"; sleep 1; done'
)
"""Removes a folder when its standard input ends, also where all processes get SIGTERM; again, where a process that is
just ending still writes there."""


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for temporary files, and remove it at the end.

    A shell waits for the end of a pipe that only this process holds, and removes the folder if that comes too early.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    reader, writer = os.pipe()
    try:
        sweeper = subprocess.Popen(["sh", "-c", SWEEP, folder], stdin=reader, start_new_session=True)
    finally:
        os.close(reader)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writer)
        sweeper.wait()
