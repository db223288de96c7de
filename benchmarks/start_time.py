"""From the command to the end of the first step: of ``unisono run``, of a script with Unisono alone, of the same script
with torch only, and of torchrun with DistributedDataParallel.

python -m benchmarks.start_time --json start_time.json

All train the same small network for one step, as often as asked, in turns. The clock starts before the command does,
and stops when the last worker has done its first step. The script with torch only shows what torch takes for itself:
its import, and what the first optimizer imports. Last, the time of ``unisono --help``, beside that of an empty Python.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks
from benchmarks.report import median_interval, print_table, write_json

ROOT = Path(benchmarks.__file__).resolve().parents[1]
LIMIT_S = 120.0


def first_step_with_unisono() -> None:
    """What a worker of ``unisono run`` does."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import unisono

    with unisono.Run(Path(os.environ["DONE"], "run"), seed=1) as run:
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        workers = int(os.environ["WORKERS"])
        data = TensorDataset(torch.randn(4 * workers, 8), torch.zeros(4 * workers, dtype=torch.long))
        for step in run.steps(data, batch_size=4 * workers, microbatches=workers):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            _done(run.rank)


def first_step_with_torch() -> None:
    """A script that knows of no workers."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long))
    loss.backward()
    optimizer.step()
    _done(0)


def first_step_with_ddp() -> None:
    """What a worker of ``torchrun`` does."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long))
    loss.backward()
    optimizer.step()
    _done(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


def _done(rank: int) -> None:
    """The same clock in all processes of a machine."""
    Path(os.environ["DONE"], str(rank)).write_text(str(time.clock_gettime(time.CLOCK_MONOTONIC)))


BODIES = {
    "torch": first_step_with_torch,
    "alone": first_step_with_unisono,
    "unisono": first_step_with_unisono,
    "torchrun": first_step_with_ddp,
}
"""What each side runs."""


def measure(side: str, workers: int) -> float:
    """Seconds from the command to the end of the slowest worker's first step."""
    if side in ("torch", "alone"):
        workers = 1
    with tempfile.TemporaryDirectory(prefix="unisono-start-time-") as folder:
        environment = {
            **os.environ,
            "DONE": folder,
            "WORKERS": str(workers),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # what is installed was compiled once
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        if side == "unisono":
            command = ["unisono", "run", "-m", "benchmarks.start_time", "--workers", str(workers), "--", "--body", side]
        elif side != "torchrun":
            command = ["benchmarks.start_time", "--body", side]
        else:
            command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "--no-python"]
            command += [sys.executable, "-m", "benchmarks.start_time", "--body", side]
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        with subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=LIMIT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise RuntimeError(f"{side} ended with exit code {process.returncode}:\n{said.decode(errors='replace')}")
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(workers)) - start


def help_times(runs: int) -> tuple[float, float]:
    """The shortest seconds of ``unisono --help``, and of a Python that does nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": ""}

    def seconds(*words: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    return min(seconds("-m", "unisono", "--help") for _ in range(runs)), min(seconds("-c", "") for _ in range(runs))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="5 runs")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--body", choices=list(BODIES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.body is not None:
        BODIES[options.body]()
        return
    seconds: dict[str, list[float]] = {side: [] for side in BODIES}
    for side in seconds:
        measure(side, options.workers)  # what is read from disk is in memory then
    for turn in range(5 if options.quick else options.runs):
        order = [*itertools.islice(itertools.cycle(BODIES), turn, turn + len(BODIES))]
        for side in order:
            seconds[side].append(measure(side, options.workers))
    helped, empty = help_times(5 if options.quick else options.runs)
    ratio = median_interval([a / b for a, b in zip(seconds["unisono"], seconds["torchrun"], strict=True)])
    print_table(
        ("workers", *(f"{side} s" for side in seconds), "unisono / torchrun (95%)"),
        [[str(options.workers), *(f"{statistics.median(times):.2f}" for times in seconds.values()), str(ratio)]],
    )
    more = {
        side: median_interval([a - b for a, b in zip(seconds[side], seconds["torch"], strict=True)])
        for side in ("alone", "unisono")
    }
    for side, found in more.items():
        print(f"{side}: {found} s more than torch")
    print(f"unisono --help: {helped:.3f} s; an empty Python: {empty:.3f} s")
    if options.json:
        figures = {
            f"start_to_torchrun.{options.workers}": ratio.median,
            f"start_to_torchrun_low.{options.workers}": ratio.low,
            f"start_to_torchrun_high.{options.workers}": ratio.high,
            **{f"start_beyond_torch_s.{side}.{options.workers}": found.median for side, found in more.items()},
            "help_s": helped,
        }
        write_json(options.json, figures, [{"workers": options.workers, "seconds": seconds}])


if __name__ == "__main__":
    main()
