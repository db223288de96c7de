"""Number of workers: what a command line asks for, and how many this machine has GPUs or cores for."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from unisono.errors import UsageError
from unisono.words import count

__all__ = ["Workers", "check_open_files", "check_workers", "count_gpus", "count_workers", "parse_workers"]

WORKERS_PER_CORE: Final = 64
"""More workers than that are a typing error, and would overload the machine."""

FILES_PER_WORKER: Final = 2  # the agent reads its output; others of its machine map its memory
FILES_BESIDE: Final = 40


class Workers(NamedTuple):
    """The meaning of ``--workers``."""

    start: int
    """Number of workers that begin the run."""
    minimum: int
    maximum: int
    grows: bool
    """Machines that join raise the maximum."""

    def on_one_machine(self, threads: int) -> int:
        """Return how many workers one machine starts, if it is the only one: of a range, as many as it has room for."""
        return self.start if self.grows else min(self.maximum, max(self.start, count_workers(threads)))


def parse_workers(text: str, threads: int) -> Workers:
    """Read the value of ``--workers``.

    Raises:
        UsageError: ``text`` is neither a number, nor "auto", nor a range.
    """
    wrong = UsageError(f"--workers is a number from 1, 'auto', or A:B with 1 <= A <= B, got {text!r}")
    if text == "auto":
        number = count_workers(threads)
        return Workers(number, 1, number, grows=True)
    first, colon, last = text.partition(":")
    try:
        low, high = int(first), int(last if colon else first)
    except ValueError:
        raise wrong from None
    if not 1 <= low <= high:
        raise wrong
    return Workers(low, low, high, grows=False) if colon else Workers(low, 1, low, grows=True)


def count_workers(threads: int) -> int:
    """Return how many workers this machine can run: one for every GPU, else for every core. Does not import torch."""
    gpus = count_gpus()
    if gpus:
        return gpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def count_gpus() -> int:
    """Return how many GPUs this process may use. Does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


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
