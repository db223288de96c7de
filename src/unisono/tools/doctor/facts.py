"""Facts of one machine, found out on that machine. A fact that cannot be found out has its default."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from unisono.cluster.machine.headprocess import reachable
from unisono.system.capacity import cpu_limit, machine_cores, machine_gpus
from unisono.system.fingerprint import foretold
from unisono.system.interfaces import interfaces, is_local
from unisono.system.seats import holder
from unisono.system.usage import memory_use

__all__ = ["MachineFacts", "Scope", "find_out"]

NUM_SYNCS: Final = 5
NUM_BYTES_SYNCED: Final = 65536


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at."""

    run_dir: str = "."
    """The run directory, or where one would be made."""
    ports: tuple[int, int] | None = None
    """First and last port that a firewall lets through."""
    ipv6: bool = False


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. Sizes in bytes, times in seconds."""

    host: str = ""
    addresses: list[str] = []
    """Where other machines may reach it, the likeliest first."""
    versions: dict[str, str] = {}
    """Of unisono, torch, numpy and Python; "" for one that is missing."""
    arithmetic: str = ""
    """Name of the processor: its instructions take part in the bits."""
    num_cores: int = 0
    """Those that this process may use."""
    num_gpus: int = 0
    num_taken: int = 0
    """Cores, or GPUs where there are any, that other runs hold."""
    load: float = 0.0
    """Processes that want a core, on average of the last minute."""
    core_limit: float | None = None
    """Cores' time that the control group may use."""
    memory: int = 0
    memory_free: int = 0
    shared_memory: int = 0
    """Size of /dev/shm."""
    shared_memory_free: int = 0
    open_files: int = 0
    """The limit of one process; -1: none."""
    disk_free: int = 0
    disk: str = ""
    """Type of the file system of the run directory."""
    can_write: bool = True
    disk_folder: str = ""
    """The run directory, or the nearest of its parents that exists."""
    sync_s: float = 0.0
    """Median time until a small file is on the disk."""
    ports_taken: list[int] = []
    local_ports: tuple[int, int] = (0, 0)
    """From which the system chooses, for connections between workers."""


def find_out(asked: Scope) -> MachineFacts:
    """Return the facts of this machine."""
    found: dict[str, Any] = {}
    for find in FACTS:
        with contextlib.suppress(OSError, ValueError):
            found.update(find(asked))
    return MachineFacts(**found)


def _addresses(asked: Scope) -> dict[str, Any]:
    by_ssh = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    found = [*by_ssh, reachable("::" if asked.ipv6 else "0.0.0.0"), *(each.address for each in interfaces())]
    usable = [address for address in found if not is_local(address)]
    return {"host": socket.gethostname(), "addresses": list(dict.fromkeys(usable or found))}


def _versions(asked: Scope) -> dict[str, Any]:
    versions = {"Python": platform.python_version()}
    for name in ("unisono", "torch", "numpy"):
        versions[name] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"versions": versions}


def _processors(asked: Scope) -> dict[str, Any]:
    gpus, cores = machine_gpus(), machine_cores()
    return {
        "arithmetic": foretold(os.environ)["processor"],
        "num_cores": len(cores),
        "num_gpus": len(gpus),
        "num_taken": sum(bool(holder(name)) for name in gpus or cores),
        "load": os.getloadavg()[0],
        "core_limit": cpu_limit(),
    }


def _memory(asked: Scope) -> dict[str, Any]:
    used, total = memory_use()
    return {"memory": total, "memory_free": max(0, total - used)}


def _shared_memory(asked: Scope) -> dict[str, Any]:
    found = os.statvfs("/dev/shm")
    return {
        "shared_memory": found.f_frsize * found.f_blocks,
        "shared_memory_free": found.f_frsize * found.f_bavail,
    }


def _open_files(asked: Scope) -> dict[str, Any]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {"open_files": -1 if limit == resource.RLIM_INFINITY else limit}


def _disk(asked: Scope) -> dict[str, Any]:
    folder = Path(asked.run_dir).absolute()
    folder = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    found = os.statvfs(folder)
    facts: dict[str, Any] = {"disk_free": found.f_frsize * found.f_bavail, "disk": _file_system(folder)}
    facts["disk_folder"] = str(folder)
    try:
        facts["sync_s"] = _sync_time(folder)
    except OSError:
        facts["can_write"] = False
    return facts


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder."""
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    # Of two at one place the later one is seen.
    return str(max(reversed(mounts), key=lambda each: len(each.mountpoint)).fstype) if mounts else ""


def _sync_time(folder: Path) -> float:
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(NUM_SYNCS):
            begun = time.perf_counter()
            file.write(bytes(NUM_BYTES_SYNCED))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _ports(asked: Scope) -> dict[str, Any]:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    facts: dict[str, Any] = {"local_ports": (int(first), int(last))}
    if asked.ports is not None:
        facts["ports_taken"] = [port for port in range(asked.ports[0], asked.ports[1] + 1) if not _is_free(port)]
    return facts


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


FACTS: Final[tuple[Callable[[Scope], dict[str, Any]], ...]] = (
    *(_addresses, _versions, _processors, _memory, _shared_memory, _open_files, _disk, _ports),
)
