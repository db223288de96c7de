"""Loss curves of one training on 1, 4 and 8 workers, with Unisono and with DistributedDataParallel.

    python -m benchmarks.curves           # trains six times, and writes docs/assets/curves.json; about two minutes
    make figures                          # draws docs/assets/curves.svg from it

Each side trains the same network on the same samples, with the same seed and the same global batch. Only the number of
workers changes; of the four workers of Unisono one is killed on the way. Both sides draw dropout, as most trainings do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

from benchmarks import curves_sides
from benchmarks.report import write_json
from unisono.testing import Faults, run_workers

__all__ = ["RECORD", "main", "record"]

ROOT: Final = Path(__file__).resolve().parents[1]
RECORD: Final = ROOT / "docs" / "assets" / "curves.json"
WORKERS: Final = (1, 4, 8)
SCRIPT: Final = Path(curves_sides.__file__)
LIMIT_S: Final = 300.0
KILLED: Final = ("w2", 100)
"""A worker of the run on four, and the step in which it is killed."""


def with_unisono(workers: int, folder: Path) -> list[float]:
    """Return the losses of the steps.

    Raises:
        RuntimeError: the run has failed, or no worker was lost where one was to be.
    """
    worker, step = KILLED
    faults = Faults().kill(worker, step=step, at="after_backward") if workers == WORKERS[1] else None
    done = run_workers(
        SCRIPT, workers, directory=folder / f"unisono-{workers}", arguments=["unisono"], faults=faults,
        timeout_s=LIMIT_S,
    )  # fmt: skip
    if done.exit_code or (faults is not None) != (max(done.generations) > 1):
        raise RuntimeError(done.output)
    return [event["loss"] for event in done.lines if event["kind"] == "step"]


def with_ddp(workers: int, folder: Path) -> list[float]:
    """Return the losses of the steps, of all processes together."""
    import subprocess

    path = folder / f"ddp-{workers}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    subprocess.run([*command, SCRIPT, "ddp", path], check=True, timeout=LIMIT_S)
    losses: list[float] = json.loads(path.read_text())
    return losses


def record() -> dict[str, object]:
    """Train on both sides with each number of workers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = {
            side: {str(workers): train(workers, folder) for workers in WORKERS}
            for side, train in (("unisono", with_unisono), ("ddp", with_ddp))
        }
    return {"torch": torch.__version__, "killed": {"worker": KILLED[0], "step": KILLED[1]}, **sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD, help="where the losses go")
    parser.add_argument("--json", type=Path, help="write them as a result of the night, and nothing else")
    options = parser.parse_args()
    found = record()
    first, *others = (found["unisono"][str(workers)] for workers in WORKERS)  # type: ignore[index]
    if any(other != first for other in others):
        sys.exit("the runs of Unisono differ: this is a bug")
    if options.json is not None:
        write_json(options.json, {}, [found])
        return
    options.out.write_text(json.dumps(found) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
