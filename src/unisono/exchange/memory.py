"""Memory that the processes of one host share, and a way to wait for a word of it to change.

A segment is anonymous (``memfd_create``): it has no name in any file system, and it is gone with the last
process that maps it, also after ``kill -9`` of everybody. Others open it through ``/proc/PID/fd/N`` of its
creator, which the kernel allows to processes of the same user only. A mapping outlives its creator: what a
worker had published can still be read when it is dead.

Waiting uses futexes. Every word has exactly one writer, so no atomic read-modify-write is needed; the
system call that follows a store orders it before the wake-up. Where there is neither (other systems than
Linux), a segment is an unlinked-at-close file and waiting polls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import tempfile
import time
from typing import Final

import torch
from torch import Tensor

__all__ = ["Segment", "futex_wait", "futex_wake"]

_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_POLL_S: Final = 0.0002
_libc = ctypes.CDLL(None, use_errno=True) if _FUTEX is not None else None


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def futex_wait(word: ctypes.c_uint32, seen: int, timeout_s: float) -> None:
    """Return when ``word`` may differ from ``seen``, at the latest after ``timeout_s``; may return early."""
    if _libc is None:
        if word.value == seen:
            time.sleep(min(_POLL_S, timeout_s))
        return
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _libc.syscall(_FUTEX, ctypes.byref(word), 0, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)


def futex_wake(word: ctypes.c_uint32) -> None:
    """Let everybody who waits for ``word`` look again."""
    if _libc is not None:
        _libc.syscall(_FUTEX, ctypes.byref(word), 1, ctypes.c_int(0x7FFFFFFF), None, None, 0)


class Segment:
    """A piece of shared memory. Make one with `create` or `open`; `close` it."""

    def __init__(self, descriptor: int, nbytes: int, address: str, *, owner: bool) -> None:
        self.nbytes = nbytes
        self.address = address
        self._owner = owner
        self._descriptor = descriptor
        self.map = mmap.mmap(descriptor, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """``nbytes`` zero bytes that other processes of this user can open by ``address``."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
            address = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, address = tempfile.mkstemp(prefix="unisono-")
        os.ftruncate(descriptor, nbytes)
        return cls(descriptor, nbytes, address, owner=True)

    @classmethod
    def open(cls, address: str, nbytes: int) -> Segment:
        """A segment that another process created.

        Raises:
            OSError: its creator is gone.
        """
        descriptor = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, nbytes, address, owner=False)
        finally:
            os.close(descriptor)

    def tensor(self) -> Tensor:
        """(nbytes,) uint8, on the segment itself. The mapping lives as long as the tensor."""
        return torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of it. Tensors on it stay valid; the memory is freed with the last of them."""
        if self._owner and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if sys.platform != "linux":
                os.unlink(self.address)
