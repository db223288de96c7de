"""Trains examples/digits.py on 1, 2 and 4 workers of this machine, compares the runs bit by bit, and times them.

    python examples/demo.py
    python examples/demo.py --workers 1 3 -- --epochs 2

Options of digits.py follow after --. By default its batches are large enough for several workers to be worth it.
`make demo` makes an environment for this first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

UNISONO = [sys.executable, "-m", "unisono"]
SCRIPT = Path(__file__).with_name("digits.py")
SCRIPT_ARGUMENTS = ["--epochs", "12", "--batch-size", "480", "--microbatches", "4"]
"""A micro-batch of 120 pictures keeps a core busy for some 15 ms."""
FASTER = 1.2
"""From this ratio on, more workers were faster."""


def samples_per_s(directory: Path) -> float:
    """The median over the steps: the first ones, and those that another program held up, do not count."""
    lines = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    return statistics.median(
        line["samples"] / sum(line["seconds"].values()) for line in lines if line["kind"] == "step"
    )


def print_speeds(speeds: Mapping[int, float]) -> None:
    """Print the samples per second of each number of workers, and the likely reason if more were not faster."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = next(iter(speeds))
    print(f"\n--- how fast? (this machine has {cores} core{'s' if cores > 1 else ''})")
    for workers, speed in speeds.items():
        name = "workers" if workers > 1 else "worker "
        note = ", more workers than cores" if workers > max(cores, first) else ""
        print(f"{workers:3} {name} {speed:8,.0f} samples/s, {speed / speeds[first]:.2f} times the first{note}")
    if max(speeds.values()) < FASTER * speeds[first]:
        reason = "has one core" if cores == 1 else f"was busy (load {os.getloadavg()[0]:.1f})"
        print(f"More workers were not faster here: probably because this machine {reason}. The bits are the same.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where the runs are kept")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("script_arguments", nargs="*", metavar="-- ARGUMENTS", help="options of digits.py")
    arguments = parser.parse_args()
    directories = {workers: arguments.directory / f"workers-{workers}" for workers in arguments.workers}

    for workers, directory in directories.items():
        print(f"\n--- {workers} worker{'s' if workers > 1 else ''}", flush=True)
        command = [*UNISONO, "run", SCRIPT, "--workers", str(workers), "--run-dir", directory, "--overwrite"]
        done = subprocess.run([*command, "--", *SCRIPT_ARGUMENTS, *arguments.script_arguments], check=False)
        if done.returncode:
            sys.exit(f"the run on {workers} workers ended with exit status {done.returncode}; its output is above")

    first, *others = arguments.workers
    print("\n--- the same bits?", flush=True)
    differing = 0
    for workers in others:
        command = [*UNISONO, "compare", directories[first], directories[workers]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{first} and {workers} workers: {(done.stdout + done.stderr).strip()}")
        differing += done.returncode != 0

    print_speeds({workers: samples_per_s(directory) for workers, directory in directories.items()})
    if differing:
        sys.exit(f"{differing} of {len(others)} runs differ from the first: this is a bug")


if __name__ == "__main__":
    main()
