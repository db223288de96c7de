"""Control groups: what a container or a batch job lets this process have. Linux has two versions of them.

In a container the group's own path may not be there: then the container's group is at the top.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ControlGroup", "GroupMemory", "control_groups", "machine_name", "memory_of_groups", "text_of", "value_in"]

UNLIMITED: Final = 1 << 60
"""A limit of memory in version 1 that is none."""


class GroupMemory(NamedTuple):
    """Memory of a control group, in bytes."""

    limit: int
    used: int
    """Without what the kernel keeps of files and can drop at once: it fills any group in time."""


class ControlGroup(NamedTuple):
    """The folder of a control group."""

    folder: Path
    version: int

    def memory(self) -> GroupMemory | None:
        """Return the memory that the group may use and uses; None: it has no limit."""
        is_second = self.version == 2
        names = ("memory.max", "memory.current") if is_second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (text_of(self.folder / name).strip() for name in names)
        if not (limit.isdecimal() and used.isdecimal()) or int(limit) > UNLIMITED:
            return None
        idle = value_in(self.folder / "memory.stat", "inactive_file" if is_second else "total_inactive_file")
        return GroupMemory(int(limit), max(0, int(used) - idle))


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control group of this process and those that it lies in, the innermost first.

    Args:
        controller: ``cpu``, ``cpuacct`` or ``memory``; in version 2 a group has all of them.
        root: of the file system, for tests.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controllers, 1
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base) and place.is_dir():
                yield ControlGroup(place, version)


def memory_of_groups(root: Path = Path("/")) -> GroupMemory | None:
    """Return the memory of the control group with the smallest limit; None: there is no limit."""
    return min(filter(None, (group.memory() for group in control_groups("memory", root))), default=None)


def machine_name() -> str:
    """Return a name of this machine that all of its containers have: who has it, has the same clock and cards."""
    return text_of(Path("/proc/sys/kernel/random/boot_id")).strip() or os.uname().nodename


def value_in(file: Path, name: str) -> int:
    """Return a number of a file of lines ``NAME NUMBER``; 0 where it is not there."""
    for line in text_of(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def text_of(path: Path) -> str:
    """Return the text of a file; "" where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
