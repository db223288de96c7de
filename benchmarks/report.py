"""What every benchmark of the project writes: figures by name, the machine, the commit, and the single runs."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Interval", "commit", "compact", "machine", "median_interval", "print_table", "write_json"]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Interval:
    """A median, and where it lies with 95% confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def median_interval(values: Sequence[float], *, resamples: int = 2000) -> Interval:
    """The median with its bootstrap confidence interval. The same values give the same interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return Interval(
        statistics.median(values), medians[int(0.025 * resamples)], medians[min(resamples - 1, int(0.975 * resamples))]
    )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit() -> str:
    """The commit that was measured, with a ``+`` when tracked files differ from it; empty where there is no git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short=12", "HEAD")
    return name + ("+" if name and git("status", "--porcelain", "--untracked-files=no") else "")


def write_json(
    path: str | os.PathLike[str],
    figures: Mapping[str, float],
    runs: Iterable[Mapping[str, Any]],
    left_out: Mapping[str, str] | None = None,
) -> None:
    """Write the result of a benchmark: ``{"figures", "machine", "commit", "runs", "left_out"}``.

    Args:
        runs: every repetition, as it was measured.
        left_out: by name, why a side took no part.
    """
    rounded = {name: round(value, 5) for name, value in figures.items()}
    result = {"figures": rounded, "machine": machine(), "commit": commit(), "runs": list(runs)}
    Path(path).write_text(compact({**result, "left_out": dict(left_out or {})}), encoding="utf-8")


def compact(value: object) -> str:
    """Return JSON in which a list of numbers is one line."""
    written = json.dumps(value, indent=1, default=str)
    return re.sub(r'\[\n\s+([^\[\]{}"]*?)\n\s*\]', lambda found: f"[{' '.join(found[1].split())}]", written) + "\n"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip(), flush=True)
