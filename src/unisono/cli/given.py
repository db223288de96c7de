"""What is given on a command line, checked before anything is started."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Final

import click

from unisono.errors import UsageError
from unisono.words import count

__all__ = ["check_open_files", "check_text", "check_workers", "seconds"]

WORKERS_PER_CORE: Final = 64
"""More than that is a slip of the finger, and would take the machine away from everybody."""

FILES_PER_WORKER: Final = 2  # the agent reads its output; others of its machine map its memory
FILES_BESIDE: Final = 40


def seconds(name: str, default_s: float, words: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """An option that is a time above 0, and one that passes."""
    return click.option(name, default=default_s, show_default=True, callback=_check_seconds, help=words)


def _check_seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not 0 < value < math.inf:
        raise UsageError(f"{param.opts[0]} is a time in seconds above 0, got {value}")
    return value


def check_text(what: str, *texts: str) -> None:
    """Refuse what cannot be sent to other processes: Python reads bytes that are not UTF-8 as half characters."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            if encoding == "utf-8":
                raise UsageError(f"{what} is not UTF-8: {os.fsencode(text)!r}; use another name") from None
            raise UsageError(
                f"{what} cannot be read in this locale, whose encoding is {encoding}: {os.fsencode(text)!r}; set "
                "PYTHONUTF8=1"
            ) from None


def check_workers(num_workers: int, num_machines: int = 1) -> None:
    """Refuse a number of workers that cannot be meant."""
    cores = os.cpu_count() or 1
    if num_workers > WORKERS_PER_CORE * cores * num_machines:
        place = f" of {num_machines} machines" if num_machines > 1 else ""
        raise UsageError(
            f"{num_workers} workers are more than {WORKERS_PER_CORE} for every core{place} ({count(cores, 'core')} "
            "here); use fewer"
        )


def check_open_files(num_workers: int) -> None:
    """Refuse to start more workers than the limit of open files lets this machine's processes speak with."""
    needed = FILES_PER_WORKER * num_workers + FILES_BESIDE
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != limit < needed:
        raise UsageError(
            f"{count(num_workers, 'worker')} need about {needed} open files in one process, the limit is {limit}; "
            f"raise it (ulimit -n {needed}), or use fewer"
        )
