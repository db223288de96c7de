"""Number of workers: what a command line asks for, and how many this machine has free GPUs or cores for."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

from unisono.core.errors import UsageError
from unisono.core.settings import split_parts
from unisono.core.words import count
from unisono.system import seats
from unisono.system.controlgroups import ControlGroup, control_groups, text_of
from unisono.system.lifetime import run_bound

__all__ = [
    "FILES_BESIDE",
    "FILES_PER_WORKER",
    "Workers",
    "check_open_files",
    "check_workers",
    "cpu_limit",
    "free_workers",
    "machine_cores",
    "machine_gpus",
    "parse_workers",
]

WORKERS_PER_CORE: Final = 64
"""More workers than that are a typing error, and would overload the machine."""

FILES_PER_WORKER: Final = 2  # the agent reads its output; others of its machine map its memory
FILES_BESIDE: Final = 40

LIST_S: Final = 10.0
"""For the driver's tool to list the GPUs."""


class Workers(NamedTuple):
    """The meaning of ``--workers``. All numbers are of workers, and not of groups."""

    start: int
    """Number of workers that begin the run."""
    minimum: int
    maximum: int
    grows: bool
    """Machines that join raise the maximum."""
    parts: int = 1
    """Workers of a group (`RunSettings.parts`)."""

    @staticmethod
    def found(number: int, parts: int) -> Workers:
        """Return the meaning of "auto" where machines have room for so many workers.

        Raises:
            UsageError: that is less than a group.
        """
        if number < parts:
            raise UsageError(
                f"there is room for {count(number, 'worker')}, and a group has {parts} (--workers autox{parts}); give "
                "the number of groups, or use more machines"
            )
        return Workers(number, parts, number, grows=True, parts=parts)

    def on_one_machine(self, threads: int) -> int:
        """Return how many workers one machine starts, if it is the only one: of a range, as many as it has room for."""
        if self.grows:
            return self.start
        return min(self.maximum, max(self.start, free_workers(threads) // self.parts * self.parts))


def parse_workers(text: str, threads: int) -> Workers:
    """Read the value of ``--workers``.

    Raises:
        UsageError: ``text`` is neither a number, nor "auto", nor a range.
    """
    groups, parts = split_parts(text)
    behind = "" if groups == text else f" before the x of {text}"
    wrong = UsageError(f"--workers must be a number from 1, 'auto', or A:B with 1 <= A <= B; got {groups!r}{behind}")
    if groups == "auto":
        return Workers.found(max(1, free_workers(threads) // parts) * parts, parts)
    first, colon, last = groups.partition(":")
    try:
        low, high = int(first), int(last if colon else first)
    except ValueError:
        raise wrong from None
    if not 1 <= low <= high:
        raise wrong
    low, high = low * parts, high * parts
    return Workers(low, low if colon else parts, high, grows=not colon, parts=parts)


def free_workers(threads: int) -> int:
    """Return how many workers this machine has room for now, beside other runs; 1 where all is taken.

    One for every GPU, else for every core (for every ``threads`` of them). Does not import torch.

    This process takes all free GPUs and cores at the same time (`unisono.system.seats`), so two runs that start
    together do not count the same ones. The agent keeps those of its workers.
    """
    gpus = machine_gpus()
    free_gpus, free_cores = seats.take(gpus), seats.take(machine_cores())
    return max(1, len(free_gpus) if gpus else len(free_cores) // threads)


def machine_cores() -> list[str]:
    """Return names of the cores that this process may use. Of a container with a limit of CPU time: so many of them."""
    if hasattr(os, "sched_getaffinity"):
        numbers = sorted(os.sched_getaffinity(0))
    else:
        numbers = list(range(os.cpu_count() or 1))
    limit = cpu_limit()
    return [f"core-{number}" for number in (numbers if limit is None else numbers[: max(1, int(limit))])]


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many cores' time the control group of this process may use; None: there is no limit.

    The smallest limit counts, of the group or of one that it lies in.
    """
    limits = (_cpu_limit_of(group) for group in control_groups("cpu", root))
    return min((limit for limit in limits if limit is not None), default=None)


def _cpu_limit_of(group: ControlGroup) -> float | None:
    if group.version == 2:
        quota, _, period = text_of(group.folder / "cpu.max").partition(" ")
    else:
        quota, period = (text_of(group.folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() else None


def machine_gpus() -> list[str]:
    """Return names of the GPUs that this process may use, in the order in which CUDA counts them. Imports no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [f"gpu-{name.strip()}" for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [f"gpu-{number}" for number in range(_count_gpus())]


def _count_gpus() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    try:
        listed = run_bound(["nvidia-smi", "-L"], LIST_S)
    except OSError:  # it is not there
        return 0
    return sum(line.startswith("GPU ") for line in listed.output.splitlines())


def check_workers(num_workers: int, num_machines: int = 1) -> None:
    """Raise UsageError for a number of workers that must be a typing error."""
    cores = os.cpu_count() or 1
    if num_workers > WORKERS_PER_CORE * cores * num_machines:
        where = f" of {num_machines} machines" if num_machines > 1 else ""
        raise UsageError(
            f"{num_workers} workers are more than {WORKERS_PER_CORE} for every core{where} ({count(cores, 'core')} "
            "here); use fewer"
        )


def check_open_files(num_workers: int) -> None:
    """Raise UsageError if the limit of open files is too low for this number of workers."""
    needed = FILES_PER_WORKER * num_workers + FILES_BESIDE
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != limit < needed:
        raise UsageError(
            f"{count(num_workers, 'worker')} need about {needed} open files in one process, the limit is {limit}; "
            f"raise it (ulimit -n {needed}), or use fewer"
        )
