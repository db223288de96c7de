"""The memory that processes of this machine may have, and whom the kernel has killed for it."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

from unisono.core.words import shown_bytes
from unisono.system.controlgroups import ControlGroup, control_groups, text_of, value_in

__all__ = [
    "NEAR",
    "Kills",
    "MemoryLimit",
    "limit_growth",
    "memory_limit",
    "own_address_space",
    "own_memory",
    "own_peak",
    "own_share",
    "reset_peak",
]

NEAR: Final = 0.97
"""A group that uses so much of its memory is at its limit."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class MemoryLimit(NamedTuple):
    """A limit, and how much of it is used, in bytes."""

    limit: int
    used: int
    of: str

    @property
    def words(self) -> str:
        return f"{shown_bytes(self.used)} of {shown_bytes(self.limit)} of {self.of}"


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit that is nearest: of a control group (of a container, a batch job), or of the machine."""
    found = [limit for group in control_groups("memory", root) if (limit := _limit_of(group)) is not None]
    total, available = (_bytes_in(root / "proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    if total:
        found.append(MemoryLimit(total, total - available, "this machine's memory"))
    return min(found, key=lambda each: each.limit - each.used, default=None)


def own_memory() -> int:
    """Return the memory of this process that is in use, in bytes; 0: unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return 0


def own_share() -> int:
    """Return the memory of this process, in bytes, of which it counts its part of what it shares with other processes
    (their code, and sums in shared memory); all of it where the system does not say.
    """
    return _bytes_in(Path("/proc/self/smaps_rollup"), "Pss") or own_memory()


def own_peak() -> int:
    """Return the most memory that this process has had, in bytes, with all that it shares; 0: unknown."""
    return _bytes_in(Path("/proc/self/status"), "VmHWM")


def reset_peak() -> None:
    """Let `own_peak` begin anew, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def own_address_space() -> MemoryLimit | None:
    """Return the limit of this process's address space (``ulimit -v``); None: there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        return MemoryLimit(limit, used, "address space (ulimit -v)")
    return None


def limit_growth(room: int) -> None:
    """Let this process have so many bytes more than now, at most: what needs more gets an error, and no process of the
    machine is killed for it. Does nothing where the system has no such limit.
    """
    if not (used := _bytes_in(Path("/proc/self/status"), "VmData")):
        return
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [used + room, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


class Kills:
    """Counts the processes that the kernel has killed for their memory.

    Args:
        root: of the file system, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        # The innermost group counts the kills below it as well, and is full when the kernel kills for its limit.
        self._group = next(control_groups("memory", root), None)
        self._known = self._read()
        self.limit: MemoryLimit | None = None
        """Of the memory, when `new` has last found that a process was killed for it."""

    def new(self) -> str:
        """Return why a process that was killed by SIGKILL just now was killed; "": nothing says that it was for memory.

        Cheap: the others of the run wait for the news of its end.
        """
        before, self._known = self._known, self._read()
        group, machine = (now - then for now, then in zip(self._known, before, strict=True))
        if not group and not machine and not self._is_full():
            return ""
        limit = self.limit = memory_limit(self._root)
        size = f" ({shown_bytes(limit.limit)} of {limit.of})" if limit is not None else ""
        if group > 0:
            return f"the kernel killed it because its control group ran out of memory{size}"
        if machine > 0:
            return f"the kernel killed a process of this machine for lack of memory at that moment{size}"
        return f"it was killed when its control group was at its limit{size}"

    def _read(self) -> tuple[int, int]:
        """Return the numbers of this control group and of the machine."""
        of_group = 0
        if self._group is not None:
            folder, version = self._group
            of_group = value_in(folder / ("memory.events" if version == 2 else "memory.oom_control"), "oom_kill")
        return of_group, value_in(self._root / "proc/vmstat", "oom_kill")

    def _is_full(self) -> bool:
        if self._group is None:
            return False
        limit = _limit_of(self._group)
        return limit is not None and limit.used >= NEAR * limit.limit


def _limit_of(group: ControlGroup) -> MemoryLimit | None:
    """Return the limit of a control group; None: it has none."""
    memory = group.memory()
    return MemoryLimit(memory.limit, memory.used, "its control group's memory") if memory is not None else None


def _bytes_in(file: Path, name: str) -> int:
    """Return a number of a file of lines ``NAME: NUMBER kB``, in bytes; 0 where it is not there."""
    for line in text_of(file).splitlines():
        key, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if key == name and number.isdecimal():
            return int(number) * 1024
    return 0
