"""Shared memory of the processes of one host, and waits for a change of one of its 32-bit words.

A segment is anonymous (``memfd_create``): it has no name in any file system, and it is gone with the last
process that maps it, also after ``kill -9`` of all processes. Others open it through ``/proc/PID/fd/N`` of its
creator, which the kernel allows to processes of the same user only. A mapping outlives its creator: memory
that a worker has published can still be read after the worker's death.

Process and descriptor numbers are used again. So every segment ends with a random stamp that its address
repeats: opening an address gives the right segment, or an error.

Waiting uses futexes. Every word has exactly one writer, so no atomic read-modify-write is needed, but order is:
`fence` stands between the announced memory and the word that announces it, on both sides. Where there are no
futexes (other systems than Linux), a segment is an unlinked-at-close file, waiting polls, and order is taken on trust.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import sys
import tempfile
import time
from typing import Final

import torch
from torch import Tensor

from unisono.core.errors import UsageError

__all__ = ["Segment", "fence", "futex_wait", "futex_wake", "transient"]

_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_POLL_S: Final = 0.0002
_STAMP_BYTES: Final = 8
_libc = ctypes.CDLL(None, use_errno=True) if _FUTEX is not None else None
# A wake-up returns at once, and so it keeps the interpreter: to let go of it would let another thread run in between.
_prompt_libc = ctypes.PyDLL(None) if _FUTEX is not None else None
_ALL: Final = ctypes.c_int(0x7FFFFFFF)


_LIMITS: Final = {
    errno.EFBIG: "ulimit -f shows how large a file may be, and shared memory counts as a file",
    errno.EMFILE: "ulimit -n shows how many files a process may have open",
    errno.ENFILE: "sysctl fs.file-max shows how many files this machine may have open",
}
"""Limits of this process or machine, by error number. Trying again with other members would not help."""


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
    """Wake all threads that wait for ``word``."""
    if _prompt_libc is not None:
        _prompt_libc.syscall(_FUTEX, ctypes.byref(word), 1, _ALL)


_fence_word = ctypes.c_uint32()


def fence() -> None:
    """Order memory accesses: all reads and writes before this call are done before any after it."""
    # Without a full memory barrier the kernel could not see whether a thread waits, so a wake-up is one.
    futex_wake(_fence_word)


def _refused(nbytes: int, error: OSError) -> UsageError:
    words = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        words += f" (the limit is {resource.getrlimit(resource.RLIMIT_FSIZE)[0]:,} bytes)"
    advice = f"; {_LIMITS[error.errno]}: raise that limit" if error.errno in _LIMITS else ""
    return UsageError(f"this worker cannot get {nbytes:,} bytes of shared memory: {words}{advice}")


def transient(nbytes: int) -> Tensor:
    """Return (nbytes,) uint8 of zeros, in memory that goes back to the system when the tensor is gone.

    Freed memory is kept otherwise (`unisono.engine.loop.process_settings`), and a large piece that is seldom needed
    would leave a hole that nothing else fits into.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


class Segment:
    """A piece of shared memory, zero at first. Make one with `create` or `open`; `close` it."""

    def __init__(self, descriptor: int, nbytes: int, address: str, access: int = mmap.ACCESS_WRITE) -> None:
        self.nbytes = nbytes
        self.address = address
        self._descriptor = descriptor
        self._unlink = ""
        self.map = mmap.mmap(descriptor, nbytes + _STAMP_BYTES, access=access)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Create ``nbytes`` zero bytes that other processes of this user can open by ``address``.

        Raises:
            UsageError: a limit of this process forbids so much. Trying again with other members would not help.
        """
        try:
            return cls._create(nbytes)
        except OSError as error:
            raise _refused(nbytes, error) from error

    @classmethod
    def _create(cls, nbytes: int) -> Segment:
        if sys.platform == "linux":
            descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, path = tempfile.mkstemp(prefix="unisono-")
        stamp = os.urandom(_STAMP_BYTES)
        try:
            os.ftruncate(descriptor, nbytes + _STAMP_BYTES)
            segment = cls(descriptor, nbytes, f"{nbytes}:{stamp.hex()}:{path}")
        except BaseException:
            os.close(descriptor)
            raise
        segment.map[nbytes:] = stamp
        segment._unlink = "" if sys.platform == "linux" else path
        return segment

    @classmethod
    def open(cls, address: str, *, copy_on_write: bool = False) -> Segment:
        """Open a segment that a process created.

        Args:
            copy_on_write: what this process writes, no other one sees; of a page that it has written, it does not see
                what others write.

        Raises:
            FileNotFoundError: the creator has ended, or has closed the segment.
            UsageError: a limit of this process forbids to open more.
        """
        size, stamp, path = address.split(":", 2)
        nbytes = int(size)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _LIMITS:
                raise _refused(nbytes, error) from error
            raise FileNotFoundError(f"shared memory {path} is gone: {error}") from error
        try:
            # The size first: reading behind the end of a file is not an error but a signal.
            if os.fstat(descriptor).st_size == nbytes + _STAMP_BYTES:
                access = mmap.ACCESS_COPY if copy_on_write else mmap.ACCESS_WRITE
                segment = cls(descriptor, nbytes, address, access)
                segment._descriptor = -1
                if segment.map[nbytes:].hex() == stamp:
                    return segment
        finally:
            os.close(descriptor)
        raise FileNotFoundError(f"shared memory {path} is gone: its name now belongs to something else")

    def tensor(self) -> Tensor:
        """(nbytes,) uint8, on the segment itself. The mapping lives as long as the tensor."""
        return torch.frombuffer(self.map, dtype=torch.uint8, count=self.nbytes)

    def close(self) -> None:
        """Close the segment: no process can open it any more. Tensors stay valid; the memory is freed with the last."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            if self._unlink:
                os.unlink(self._unlink)
