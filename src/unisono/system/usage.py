"""Use of this machine: cores, memory, network; and of its workers, with the processes that they have started.

In a container the container's limits count: its cores, and its memory.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from unisono.core.events import GpuUse, MachineUsed, WorkerUse
from unisono.system.capacity import cpu_limit, machine_cores, machine_gpus
from unisono.system.controlgroups import control_groups, memory_of_groups, text_of, value_in
from unisono.system.descendants import descendants

__all__ = ["Gpus", "Meter", "memory_use", "used_cores_of_group"]


class Gpus:
    """The GPUs that the workers of this machine may use. The library is loaded when the first of them is looked at.

    Args:
        names: of `machine_gpus`; default: those of this machine.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = list(machine_gpus() if names is None else names)
        self._library: Any = None
        self._handles: list[Any] = []

    def read(self) -> list[GpuUse]:
        """Return the use of each GPU; nothing where there is none, or it cannot be asked."""
        if not self._names:
            return []
        try:
            if self._library is None:
                self._library = importlib.import_module("pynvml")
                self._library.nvmlInit()
                self._handles = [_handle(self._library, name.removeprefix("gpu-")) for name in self._names]
            return [_use(self._library, handle) for handle in self._handles]
        except Exception:  # the package is not installed; the driver says no, or has other functions
            self._names = []
        return []


def _handle(library: Any, name: str) -> Any:
    """Return what the library calls a GPU, by its number or its UUID, as in CUDA_VISIBLE_DEVICES."""
    if name.isdecimal():
        return library.nvmlDeviceGetHandleByIndex(int(name))
    return library.nvmlDeviceGetHandleByUUID(name)


def _use(library: Any, handle: Any) -> GpuUse:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return GpuUse(
        utilization=library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        memory_bytes=int(memory.used),
        memory_total_bytes=int(memory.total),
    )


LOOK_EVERY: Final = 5
"""The processes that workers have started are looked for in every fifth reading."""


class _Counted(NamedTuple):
    """What was counted up to a moment."""

    at: float
    core_s: float
    sent: int
    received: int


@dataclass
class _Process:
    """A process of a worker, and the processor time that it had used when it was read last."""

    process: psutil.Process
    core_s: float


class Meter:
    """Reads the use since the reading before.

    Args:
        host: label of this machine.
        root: where ``/proc`` and ``/sys`` are looked for, for what the control group of this process may use.
    """

    def __init__(self, host: str, root: Path = Path("/")) -> None:
        self._host = host
        self._root = root
        self._num_cores = len(machine_cores())
        self._is_limited = cpu_limit(root) is not None
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._workers: dict[str, dict[int, _Process]] = {}
        self._num_readings = 0
        self._last = self._count()

    def read(self, workers: Mapping[str, int]) -> MachineUsed:
        """Return the use since the last call, or since this object was made.

        Args:
            workers: process ids by worker id.
        """
        last, self._last = self._last, self._count()
        now, seconds = self._last, max(self._last.at - last.at, 1e-6)
        used, total = memory_use(self._root)
        by_worker = {
            worker_id: use
            for worker_id, pid in workers.items()
            if (use := self._use_of(worker_id, pid, seconds)) is not None
        }
        self._num_readings += 1
        for worker_id in self._workers.keys() - workers.keys():
            del self._workers[worker_id]
        return MachineUsed(
            time=round(time.time(), 3),
            host=self._host,
            cores=round(max(0.0, now.core_s - last.core_s) / seconds, 2),
            num_cores=self._num_cores,
            memory_bytes=used,
            memory_total_bytes=total,
            sent_bytes_per_s=round(max(0, now.sent - last.sent) / seconds),
            received_bytes_per_s=round(max(0, now.received - last.received) / seconds),
            workers=by_worker,
        )

    def _count(self) -> _Counted:
        counters = psutil.net_io_counters(pernic=True)
        wires = [counted for name, counted in counters.items() if name != "lo"]
        core_s = used_cores_of_group(self._root) if self._is_limited else None
        return _Counted(
            at=time.monotonic(),
            core_s=self._core_seconds() if core_s is None else core_s,
            sent=sum(counted.bytes_sent for counted in wires),
            received=sum(counted.bytes_recv for counted in wires),
        )

    def _core_seconds(self) -> float:
        """Return how long the cores that this process may use were busy with anything."""
        each = psutil.cpu_times(percpu=True)
        mine = [each[number] for number in self._cores if number < len(each)] or each
        # The time of guests is a part of that of users.
        return float(sum(sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0) for times in mine))

    def _use_of(self, worker_id: str, pid: int, seconds: float) -> WorkerUse | None:
        known = self._workers.setdefault(worker_id, {})
        if pid not in known or self._num_readings % LOOK_EVERY == 0:
            pids = {pid, *descendants(pid)}
            for gone in known.keys() - pids:
                del known[gone]
            for each in pids - known.keys():
                with contextlib.suppress(psutil.Error):
                    found = psutil.Process(each)
                    known[each] = _Process(found, _core_seconds_of(found))
        core_s, memory = 0.0, 0
        for each, process in list(known.items()):
            try:
                before, process.core_s = process.core_s, _core_seconds_of(process.process)
                size = process.process.memory_info()
            except psutil.Error:
                del known[each]
                continue
            core_s += process.core_s - before
            # What processes share is counted once.
            memory += size.rss if each == pid else size.rss - getattr(size, "shared", 0)
        if pid not in known:
            return None
        return WorkerUse(cores=round(max(0.0, core_s) / seconds, 2), memory_bytes=max(0, memory))


def _core_seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# -- control groups ------------------------------------------------------------------------------------


def memory_use(root: Path = Path("/")) -> tuple[int, int]:
    """Return the memory that is used, and how much there is: of the control group of this process, if that is less."""
    machine, group = psutil.virtual_memory(), memory_of_groups(root)
    if group is not None and group.limit < machine.total:
        return group.used, group.limit
    return machine.total - machine.available, machine.total


def used_cores_of_group(root: Path = Path("/")) -> float | None:
    """Return the processor time of the control group of this process, in seconds; None where nobody counts it."""
    for folder, version in control_groups("cpuacct", root):
        if version == 2:
            if microseconds := value_in(folder / "cpu.stat", "usage_usec"):
                return microseconds / 1e6
        elif (text := text_of(folder / "cpuacct.usage").strip()).isdecimal():
            return int(text) / 1e9
    return None
