"""Trains examples/digits.py on 1, 2 and 4 workers of this machine, compares the runs bit by bit, and times them.

    python examples/demo.py
    python examples/demo.py --workers 1 3 -- --epochs 2

What stands after -- are the options of digits.py. `make demo` makes an environment for it first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

UNISONO = [sys.executable, "-m", "unisono"]
SCRIPT = Path(__file__).with_name("digits.py")


def samples_per_s(directory: Path) -> float:
    """The median over the steps: the first ones, and those that another program held up, do not count."""
    lines = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    return statistics.median(
        line["samples"] / sum(line["seconds"].values()) for line in lines if line["kind"] == "step"
    )


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
        done = subprocess.run([*command, "--", *arguments.script_arguments], check=False)
        if done.returncode:
            sys.exit(f"the run on {workers} workers ended with exit status {done.returncode}; its last words are above")

    first, *others = arguments.workers
    print("\n--- the same bits?", flush=True)
    differing = 0
    for workers in others:
        command = [*UNISONO, "compare", directories[first], directories[workers]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{first} and {workers} workers: {(done.stdout + done.stderr).strip()}")
        differing += done.returncode != 0

    print(f"\n--- how fast? (this machine has {os.cpu_count()} cores)")
    speeds = {workers: samples_per_s(directory) for workers, directory in directories.items()}
    for workers, speed in speeds.items():
        name = "workers" if workers > 1 else "worker "
        print(f"{workers:3} {name} {speed:8,.0f} samples/s, {speed / speeds[first]:.2f} times the first")
    if differing:
        sys.exit(f"{differing} of {len(others)} runs differ from the first: this is a bug")


if __name__ == "__main__":
    main()
