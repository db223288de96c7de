"""Memory of a worker and time of a step where the states of an optimizer are shared out, beside what torch offers.

python -m benchmarks.sharding                                   # mlp and transformer, 2 and 4 workers
python -m benchmarks.sharding --quick --cases mlp --workers 4

The sides: DistributedDataParallel with a replicated AdamW (``ddp``), the same with ZeroRedundancyOptimizer
(``ddp-zero``), FSDP2 (``fsdp2``: ``fully_shard`` of each layer and the model), and Unisono with a replicated AdamW
(``unisono``), with ``unisono.shard`` (``shard``), and with one copy of each state (``shard-1``). All on CPUs of one
host, torch's over gloo, one thread and one micro-batch a worker. They take turns, a block of steps each, so each ratio
is taken between neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import CASES
from benchmarks.report import median_interval, print_table, write_json
from benchmarks.sharding_sides import PEERS, SIDES, UNISONO
from benchmarks.step_time import started, take_turns

LIMIT_S = {"quick": 20.0, "full": 90.0}
MIB = 2**20


def _commands(side: str, case: str, workers: int, held: str, folder: Path) -> list[list[str]]:
    shared = [side, case, "--microbatches", str(workers), "--workers", str(workers), "--held", held]
    shared += ["--control", str(folder / f"{side}.socket")]
    if side in UNISONO:
        head = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.sharding_sides", "--workers", str(workers)]
        return [[*head, "--run-dir", str(folder / f"run-{side}"), "--", *shared]]
    this = [sys.executable, "-m", "benchmarks.sharding_sides", *shared, "--meeting", str(folder / f"meeting-{side}")]
    return [[*this, "--rank", str(rank)] for rank in range(workers)]


def compare(case: str, workers: int, names: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Let the sides take turns for a while."""
    with tempfile.TemporaryDirectory(prefix="unisono-benchmark-") as held:
        sides = {name: partial(_commands, name, case, workers, held) for name in names}
        with started(sides, workers) as teams:
            take_turns(teams, limit_s)
        return {
            "case": case,
            "workers": workers,
            "step_ms": {team.name: [round(1000 * block.step_s, 3) for block in team.blocks] for team in teams},
            "peak_mib": {team.name: round(team.peak_bytes / MIB, 1) for team in teams},
            "share_mib": {team.name: round(team.share_bytes / MIB, 1) for team in teams},
            "held": {name: _largest(Path(held), name) for name in names},
        }


def _largest(folder: Path, name: str) -> dict[str, float]:
    """Return what the worker with the most holds, in MiB."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"{name}-*.json") if _side(path) == name]
    largest = max(found, key=lambda each: sum(each.values()))
    return {what: round(nbytes / MIB, 1) for what, nbytes in largest.items()}


def _side(path: Path) -> str:
    return path.stem.rpartition("-")[0]


def figures_of(result: dict[str, Any]) -> tuple[dict[str, float], list[list[str]]]:
    """Return the named figures of one comparison, and its rows for the table."""
    figures: dict[str, float] = {}
    rows = []
    place, step = f"{result['case']}.{result['workers']}", result["step_ms"]
    for name, times in step.items():
        ratio = median_interval([a / b for a, b in zip(times, step["ddp"], strict=True)])
        held = result["held"][name]
        figures[f"ratio_to_ddp.{name}.{place}"] = ratio.median
        figures[f"held_mib.{name}.{place}"] = sum(held.values())
        figures[f"peak_mib.{name}.{place}"] = result["peak_mib"][name]
        rows.append(
            [
                result["case"],
                str(result["workers"]),
                name,
                f"{statistics.median(times):.1f}",
                str(ratio),
                *(f"{held[what]:.0f}" for what in ("parameters", "gradients", "states")),
                f"{sum(held.values()):.0f}",
                f"{result['peak_mib'][name]:.0f}",
                f"{result['share_mib'][name]:.0f}",
            ]
        )
    return figures, rows


HEADER = (
    *("case", "workers", "side", "step ms", "to ddp (95%)"),
    *("parameters MiB", "gradients", "states", "together", "peak MiB a worker", "with all else"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    parser.add_argument("--cases", default="mlp,transformer", metavar="A,B")
    parser.add_argument("--workers", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    parser.add_argument("--sides", default=",".join(SIDES), metavar="A,B", help="ddp is always among them")
    parser.add_argument("--seconds", type=float, help="how long the sides of one comparison take turns")
    options = parser.parse_args(arguments)
    names = [name for name in (*PEERS, *UNISONO) if name == "ddp" or name in options.sides.split(",")]
    if unknown := (set(options.cases.split(",")) - set(CASES)) | (set(options.sides.split(",")) - set(SIDES)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; cases: {', '.join(CASES)}; sides: {', '.join(SIDES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    limit_s = options.seconds or LIMIT_S["quick" if options.quick else "full"]
    runs, figures, rows = [], {}, []
    for case in options.cases.split(","):
        for workers in options.workers:
            result = compare(case, workers, names, limit_s)
            found, lines = figures_of(result)
            runs.append(result)
            figures.update(found)
            rows += lines
            for line in lines:
                print("  ".join(line), file=sys.stderr, flush=True)
    print_table(HEADER, rows)
    if options.json:
        write_json(options.json, figures, runs)


if __name__ == "__main__":
    main()
