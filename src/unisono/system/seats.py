"""Seats: the cores and GPUs of a machine, handed out to the runs that share it, without a daemon and without a file.

A seat is taken by binding a name in the abstract namespace of Unix sockets (Linux): the kernel gives a name to one
process only, and frees it when that process ends, however it ends. So nothing is left behind after ``kill -9``, and
there is no list that could be wrong. The holder binds a second name, which has its process id: the kernel's list of
names tells that to whoever asks. The names hold for all users of the machine, and for one network namespace: a
container with a network of its own hands out its own seats.

What a process holds is one fact for the whole process, so this module keeps it. Elsewhere than on Linux every seat can
be had.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["LEDGER", "holder", "release", "take"]

LEDGER: Final = "UNISONO_LEDGER"
"""Name of the environment variable with a name for this machine's seats; programs with different ones do not see each
other."""

_held: Final[dict[str, contextlib.ExitStack]] = {}  # by address


def take(names: Iterable[str]) -> list[str]:
    """Take these seats; return those that this process holds now. It may have held some of them before."""
    return [name for name in names if _take(name)]


def release(names: Iterable[str] | None = None) -> None:
    """Give these seats back; default: all that this process holds."""
    for address in list(_held) if names is None else map(_address, names):
        if (held := _held.pop(address, None)) is not None:
            held.close()


def holder(name: str) -> int:
    """Return the id of the process that holds a seat; 0 where none does, or the system does not say."""
    if _address(name) in _held:
        return os.getpid()
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            pid = line.partition(_note(name, "").replace("\0", "@"))[2]
            if pid.isdecimal() and Path(f"/proc/{pid}").exists():  # else it is of another namespace of processes
                return int(pid)
    return 0


def _take(name: str) -> bool:
    if (address := _address(name)) in _held or sys.platform != "linux":
        return True
    with contextlib.ExitStack() as sockets:
        try:
            _bind(sockets, address)
        except OSError:
            return False  # somebody has it; or no descriptor is left: workers start nevertheless, and share
        with contextlib.suppress(OSError):
            _bind(sockets, _note(name, str(os.getpid())))
        _held[address] = sockets.pop_all()
    return True


def _bind(sockets: contextlib.ExitStack, address: str) -> None:
    # Programs that this one starts do not inherit it.
    sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(address)


def _address(name: str) -> str:
    return f"\0unisono/{os.environ.get(LEDGER, '')}/{name}"


def _note(name: str, pid: str) -> str:
    return f"{_address(name)} is held by {pid}"
