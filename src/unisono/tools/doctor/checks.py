"""Checks of one machine: facts in, a finding out. To add one, write a function and add a row to `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from unisono.core.words import count
from unisono.system.capacity import FILES_BESIDE, FILES_PER_WORKER
from unisono.system.extras import install_words
from unisono.tools.doctor.facts import MachineFacts, Scope

__all__ = ["CHECKS", "Finding", "check", "size"]

GB: Final = 10**9
MEMORY_PER_WORKER: Final = GB // 2  # a process with torch, and a small model
LEAST_SHARED: Final = GB // 2
LEAST_DISK: Final = 2 * GB
SLOW_SYNC_S: Final = 0.05
OVER_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "beegfs", "gpfs", "afs", "virtiofs")
IN_MEMORY: Final = ("tmpfs", "ramfs")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str
    host: str = ""
    """Empty: of all machines together."""
    seen: str
    """What was found, with its numbers."""
    because: str = ""
    """Why that will hurt; empty: it will not."""
    do: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.because


def check(host: str, facts: MachineFacts, asked: Scope) -> list[Finding]:
    """Return the findings about one machine."""
    return [msgspec.structs.replace(test(facts, asked), check=name, host=host) for name, test in CHECKS.items()]


def size(num_bytes: float) -> str:
    """Return a size in words."""
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB / 10 else f"{num_bytes / 1e6:.0f} MB"


def _say(seen: str, because: str = "", do: str = "") -> Finding:
    return Finding(check="", seen=seen, because=because, do=do)


def _versions(facts: MachineFacts, asked: Scope) -> Finding:
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in facts.versions.items())
    if not facts.versions.get("torch"):
        return _say(seen, "workers need torch", f"in the environment that runs unisono: {install_words('torch')}")
    return _say(seen)


def _devices(facts: MachineFacts, asked: Scope) -> Finding:
    kind = "GPU" if facts.num_gpus else "core"
    number = facts.num_gpus or facts.num_cores
    seen = f"{count(number, kind)} for workers, {facts.num_taken} taken by runs; {facts.arithmetic}"
    if facts.num_taken >= number > 0:
        return _say(seen, f"every {kind} is used by another run, and sharing {kind}s slows both down",
                    "wait, or use another machine")  # fmt: skip
    return _say(seen)


def _load(facts: MachineFacts, asked: Scope) -> Finding:
    seen = f"{facts.load:.1f} processes want one of {count(facts.num_cores, 'core')}"
    if facts.load > max(1.0, facts.num_cores / 2):
        return _say(seen, "all workers wait for the slowest one, and those here share their cores",
                    "start fewer workers here, or `unisono join --while COMMAND`")  # fmt: skip
    return _say(seen)


def _cores(facts: MachineFacts, asked: Scope) -> Finding:
    if facts.core_limit is None:
        return _say("no limit on CPU time")
    seen = f"the control group has the time of {facts.core_limit:g} cores"
    if facts.core_limit < 1:
        return _say(seen, "a worker stands still for part of every 100 ms, and all others wait for it",
                    "give the container at least one whole core for each worker")  # fmt: skip
    return _say(f"{seen}; --workers auto starts {max(1, int(facts.core_limit))}")


def _memory(facts: MachineFacts, asked: Scope) -> Finding:
    seen = f"{size(facts.memory_free)} free of {size(facts.memory)}"
    workers = max(1, facts.num_gpus or facts.num_cores)
    if facts.memory_free < workers * MEMORY_PER_WORKER:
        return _say(seen, (
            f"{count(workers, 'worker')} with torch take about {size(workers * MEMORY_PER_WORKER)}; a worker that "
            "runs out of memory is killed by the system"
        ), "start fewer workers here")  # fmt: skip
    return _say(seen)


def _shared_memory(facts: MachineFacts, asked: Scope) -> Finding:
    seen = f"/dev/shm has {size(facts.shared_memory_free)} free of {size(facts.shared_memory)}"
    if facts.shared_memory_free < LEAST_SHARED:
        return _say(seen, (
            "torch's DataLoader with num_workers= hands batches over there, and dies with a bus error when it is "
            "full (Unisono itself does not use it)"
        ),
                    "docker run --shm-size=8g; or mount -o remount,size=8g /dev/shm")  # fmt: skip
    return _say(seen)


def _open_files(facts: MachineFacts, asked: Scope) -> Finding:
    if facts.open_files < 0:
        return _say("no limit")
    workers = max(1, facts.num_gpus or facts.num_cores)
    needed = FILES_PER_WORKER * workers + FILES_BESIDE + workers
    seen = f"{facts.open_files} for a process"
    if facts.open_files < needed:
        return _say(seen, f"an agent with {count(workers, 'worker')} needs about {needed}", f"ulimit -n {needed}")
    return _say(seen)


def _disk(facts: MachineFacts, asked: Scope) -> Finding:
    seen = f"{size(facts.disk_free)} free, {facts.disk or 'unknown file system'}, {facts.sync_s * 1e3:.1f} ms to write"
    if facts.disk_folder not in ("", asked.run_dir):
        seen += f"; {asked.run_dir} is not there yet: looked at {facts.disk_folder}"
    if not facts.can_write:
        return _say(seen, f"nothing can be written in {asked.run_dir}", "choose another --run-dir")
    if facts.disk_free < LEAST_DISK:
        return _say(seen, "checkpoints stop when the disk is full", "make room, or choose another --run-dir")
    if facts.disk in IN_MEMORY:
        return _say(seen, "it is in memory: the run's journal and checkpoints are lost when the machine restarts",
                    "choose a --run-dir on a disk")  # fmt: skip
    if facts.sync_s > SLOW_SYNC_S:
        return _say(seen, "each line of the journal and each checkpoint waits for the disk",
                    "choose a --run-dir on a faster disk, e.g. one of the machine itself")  # fmt: skip
    if facts.disk in OVER_NETWORK:
        return _say(f"{seen}; other machines may see the same files")
    return _say(seen)


def _ports(facts: MachineFacts, asked: Scope) -> Finding:
    system = f"the system chooses from {facts.local_ports[0]} to {facts.local_ports[1]}"
    if asked.ports is None:
        return _say(system)
    first, last = asked.ports
    number = last - first + 1
    seen = f"{number - len(facts.ports_taken)} of {number} free from {first} to {last}; {system}"
    if len(facts.ports_taken) == number:
        return _say(seen, "the head finds no port", "choose another range (--ports)")
    if not (first <= facts.local_ports[0] and facts.local_ports[1] <= last):
        return _say(seen, "workers listen for each other at ports that the system chooses, outside of that range",
                    f"as root, on each machine: sysctl net.ipv4.ip_local_port_range='{first} {last}'; or let the "
                    "firewall pass everything between these machines")  # fmt: skip
    return _say(seen)


CHECKS: Final[Mapping[str, Callable[[MachineFacts, Scope], Finding]]] = {
    "versions": _versions,
    "devices": _devices,
    "load": _load,
    "CPU limit": _cores,
    "memory": _memory,
    "shared memory": _shared_memory,
    "open files": _open_files,
    "disk": _disk,
    "ports": _ports,
}
