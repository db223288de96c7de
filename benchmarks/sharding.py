"""Memory of the workers and time of a step where a training is shared out over them, beside what torch offers.

python -m benchmarks.sharding                                   # mlp and transformer, 2 and 4 workers
python -m benchmarks.sharding --quick --cases mlp --workers 4
python -m benchmarks.sharding --cases large --size 500 --workers 4 --sides shard,host,host-1,owners-1 --apart

The sides: DistributedDataParallel with a replicated AdamW (``ddp``), the same with ZeroRedundancyOptimizer
(``ddp-zero``), FSDP2 (``fsdp2``: ``fully_shard`` of each layer and the model), and Unisono with a replicated AdamW
(``unisono``), with ``unisono.shard`` (``shard``), and with one copy of each state (``shard-1``). By their names only,
since all at once need much memory: one copy of the parameters for all workers of the host (``host``, and ``host-1``
with one copy of each state), and sums of gradients that go to the owners only (``owners-1``).

All on CPUs of one host, torch's over gloo, one thread and one micro-batch a worker. They take turns, a block of steps
each, so each ratio is taken between neighbours in time. After all turns their memory is measured, side by side: the sum
of the proportional set sizes (a page that n processes map counts 1/n) of the workers, while they wait between two steps
and at most while they train. What comes before, such as making the model, is not in it. The parts of a worker are in
it: slots of the sums, freed memory that is kept, Python and PyTorch; of the libraries' own pages little, since all
sides share them. What a worker holds is counted from its tensors, the parameters of which a host has one copy in equal
parts.

All sides keep freed memory, as the library does by itself, so they have between two steps nearly what they have at
most, and what was needed only at the beginning may still be there. With MALLOC_TRIM_THRESHOLD_=131072 in the
environment none of them keeps it, and steps take longer.
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

from benchmarks.report import median_interval, print_table, write_json
from benchmarks.sharding_sides import LARGE, NAMES, PEERS, SIDES, UNISONO
from benchmarks.step_time import started, take_turns

LIMIT_S = {"quick": 20.0, "full": 90.0}
MIB = 2**20
BASE = "ddp"
USUAL = (*PEERS, "unisono", "shard", "shard-1")


def _commands(side: str, case: str, size: int, workers: int, held: str, folder: Path) -> list[list[str]]:
    shared = [side, case, "--microbatches", str(workers), "--workers", str(workers), "--held", held]
    shared += ["--size", str(size)]
    shared += ["--control", str(folder / f"{side}.socket")]
    if side in UNISONO:
        head = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.sharding_sides", "--workers", str(workers)]
        return [[*head, "--run-dir", str(folder / f"run-{side}"), "--", *shared]]
    this = [sys.executable, "-m", "benchmarks.sharding_sides", *shared, "--meeting", str(folder / f"meeting-{side}")]
    return [[*this, "--rank", str(rank)] for rank in range(workers)]


def compare(case: str, size: int, workers: int, names: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Let the sides take turns for a while.

    Args:
        size: MB of the parameters of the case `LARGE`.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-benchmark-") as held:
        sides = {name: partial(_commands, name, case, size, workers, held) for name in names}
        with started(sides, workers) as teams:
            take_turns(teams, limit_s)
        return {
            "case": case,
            **({"size_mb": size} if case == LARGE else {}),
            "workers": workers,
            "step_ms": {team.name: [round(1000 * block.step_s, 3) for block in team.blocks] for team in teams},
            "peak_mib": {team.name: round(team.peak_bytes / MIB, 1) for team in teams},
            "share_mib": {team.name: round(team.share_bytes / MIB, 1) for team in teams},
            "workers_steady_mib": {team.name: round(team.workers_steady_bytes / MIB, 1) for team in teams},
            "workers_peak_mib": {team.name: round(team.workers_peak_bytes / MIB, 1) for team in teams},
            "held": {name: _largest(Path(held), name) for name in names},
        }


def _largest(folder: Path, name: str) -> dict[str, float]:
    """Return what the worker with the most holds, in MiB."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"{name}-*.json") if _side(path) == name]
    largest = max(found, key=lambda each: sum(each.values()))
    return {what: round(nbytes / MIB, 1) for what, nbytes in largest.items()}


def _side(path: Path) -> str:
    return path.stem.rpartition("-")[0]


def figures_of(result: dict[str, Any]) -> tuple[dict[str, float], dict[tuple[str, int, str], list[str]]]:
    """Return the named figures of one comparison, and its rows for the table by case, workers and side."""
    figures: dict[str, float] = {}
    rows = {}
    place, step = f"{result['case']}.{result['workers']}", result["step_ms"]
    for name, times in step.items():
        ratio = median_interval([a / b for a, b in zip(times, step[BASE], strict=True)])
        held = result["held"][name]
        figures[f"ratio_to_ddp.{name}.{place}"] = ratio.median
        figures[f"held_mib.{name}.{place}"] = sum(held.values())
        for what in ("peak_mib", "workers_steady_mib", "workers_peak_mib"):
            figures[f"{what}.{name}.{place}"] = result[what][name]
        rows[result["case"], result["workers"], name] = [
            *(result["case"], str(result["workers"]), name),
            *(f"{held[what]:.0f}" for what in ("parameters", "gradients", "states")),
            f"{sum(held.values()):.0f}",
            f"{result['workers_steady_mib'][name]:.0f}",
            f"{result['workers_peak_mib'][name]:.0f}",
            *(f"{statistics.median(times):.1f}", str(ratio)),
        ]
    return figures, rows


def together(names: Sequence[str], *, apart: bool) -> list[list[str]]:
    """Return the sides that take turns with each other.

    Args:
        apart: each with `BASE` alone.
    """
    others = [name for name in names if name != BASE]
    return [[BASE, name] for name in others] if apart and others else [list(names)]


HEADER = (
    *("case", "workers", "side", "a worker's parameters MiB", "gradients", "states", "together"),
    *("all workers between steps MiB", "at most", "step ms", "to ddp (95%)"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    parser.add_argument("--cases", default="mlp,transformer", metavar="A,B", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--size", type=int, default=500, metavar="MB", help=f"of the parameters of {LARGE}")
    parser.add_argument("--workers", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    parser.add_argument(
        "--sides",
        default=",".join(USUAL),
        metavar="A,B",
        help=f"of {', '.join(SIDES)}; {BASE} is always among them; default: %(default)s",
    )
    parser.add_argument("--apart", action="store_true", help=f"each side takes turns with {BASE} alone: in less memory")
    parser.add_argument("--seconds", type=float, help="how long the sides of one comparison take turns")
    options = parser.parse_args(arguments)
    names = [name for name in (*PEERS, *UNISONO) if name == BASE or name in options.sides.split(",")]
    if unknown := (set(options.cases.split(",")) - set(NAMES)) | (set(options.sides.split(",")) - set(SIDES)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; cases: {', '.join(NAMES)}; sides: {', '.join(SIDES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    limit_s = options.seconds or LIMIT_S["quick" if options.quick else "full"]
    runs, figures, rows = [], dict[str, float](), dict[tuple[str, int, str], list[str]]()
    for case in options.cases.split(","):
        for workers in options.workers:
            for each in together(names, apart=options.apart):
                result = compare(case, options.size, workers, each, limit_s)
                found, lines = figures_of(result)
                runs.append(result)
                figures = {**found, **figures}
                for key in [key for key in lines if key not in rows]:
                    rows[key] = lines[key]
                    print("  ".join(lines[key]), file=sys.stderr, flush=True)
    print_table(HEADER, list(rows.values()))
    if options.json:
        write_json(options.json, figures, runs)


if __name__ == "__main__":
    main()
