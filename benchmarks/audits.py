"""What audits find where nothing is wrong, and what they cost.

python -m benchmarks.audits                          # some minutes
python -m benchmarks.audits --leaves 10000 --json audits.json
python -m benchmarks.audits --only cost

**False alarms**: trainings of three models, over each exchange, in which workers are killed at random points, with one
micro-batch of each worker audited in each step. A conviction, an error or another bit than in the run of one worker
would be a false alarm. **Cost**: the time of the steps that are audited against that of the others of the same run,
which a busy machine slows down alike; steps in which every run compares states do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import unisono
from unisono.core.rehearsals import is_compared
from unisono.testing import Faults, Outcome, run_workers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it is a worker's script
from benchmarks.models import CASES
from benchmarks.report import median_interval, print_table, write_json

MICROBATCHES = 16
WARM_UP = 10
SHARE = 0.09
"""Half of the steps are audited, with three workers and 16 micro-batches."""
SIDES = (("shared", 3, 1), ("gloo", 3, 1), ("two-level", 4, 2))
AT = (
    "step_head",
    "before_backward",
    "after_backward",
    "before_combine",
    "published",
    "reduced",
    "committed",
    "after_step",
)
PATIENT = (
    "--set",
    "heartbeat-timeout=60s",
    "--set",
    "go-on-without-after=60s",
    "--set",
    "kill-after=240s",
    "--max-restarts",
    "100",
)
TIMEOUT_S = 900.0


def train(case_name: str, num_steps: int, size: int) -> None:
    """Be a worker."""
    case = CASES[case_name]
    with unisono.Run(seed=1, device="cpu") as run:
        model = case.model()
        run.track(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)))
        batch = MICROBATCHES * (size or case.microbatch_size)
        for step in run.steps(
            case.data(4 * batch), batch_size=batch, microbatches=MICROBATCHES, epochs=10**6, max_steps=num_steps
        ):
            for inputs, labels in step:
                step.backward(case.loss(model, inputs, labels))
            optimizer.step()


def started(
    case: str, folder: Path, workers: int, num_steps: int, size: int, *options: str, faults: Faults | None = None
) -> Outcome:
    found = run_workers(
        __file__,
        workers,
        directory=folder,
        options=[*PATIENT, *options],
        arguments=["--be", case, "--steps", str(num_steps), "--size", str(size)],
        faults=faults,
        timeout_s=TIMEOUT_S,
    )
    if found.exit_code != 0:
        raise SystemExit(found.output)
    return found


def random_kills(workers: int, num_steps: int, number: int, draw: random.Random) -> Faults:
    """Workers that are killed at random points; those that replace them too."""
    faults = Faults()
    for nth in range(number):
        worker = f"w{draw.randrange(workers) if nth == 0 else workers + nth - 1}"
        step = num_steps * (nth + 1) // (number + 1) + draw.randrange(5)
        faults = faults.kill(worker, at=draw.choice(AT), step=step)
    return faults


def false_alarms(folder: Path, num_leaves: int, names: Sequence[str], seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    audited = alarms = lost = 0
    each = -(-num_leaves // (len(names) * len(SIDES)))
    for case in names:
        for exchange, workers, hosts in SIDES:
            num_steps = -(-each // workers) + 20
            faults = random_kills(workers, num_steps, 3, draw)
            name = f"{case}-{exchange}"
            share = workers / MICROBATCHES  # one of each worker, in each step
            options = ["--exchange", exchange, "--set", f"simulate-hosts={hosts}", "--audit", str(share)]
            hurt = started(case, folder / name, workers, num_steps, 1, *options, faults=faults)
            alone = started(case, folder / f"{name}-alone", 1, num_steps, 1)
            found = sum(len(line.get("audits") or {}) for line in hurt.lines)
            wrong = hurt.output.count("computes wrong values") + (hurt.digests != alone.digests)
            kills = hurt.output.count("SIGKILL")
            print(f"{name}: {found} audited, {kills} workers lost, {wrong} false alarms", flush=True)
            audited, alarms, lost = audited + found, alarms + wrong, lost + kills
    return {"audited": audited, "false_alarms": alarms, "lost": lost}


def overhead_of(outcome: Outcome) -> float:
    """Return the time of the run's steps, over what they would have taken if none had been audited."""
    audited, plain = list[float](), list[float]()
    for line in outcome.lines:
        if line["kind"] == "step" and line["step"] >= WARM_UP and not is_compared(line["step"]):
            (audited if line.get("audits") else plain).append(sum(line["seconds"].values()))
    part = len(audited) / (len(audited) + len(plain))
    return 1.0 + part * (statistics.median(audited) / statistics.median(plain) - 1)


def cost(
    folder: Path, share: float, repeats: int, num_steps: int, names: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    """Return by case and exchange what the audits of each repetition cost."""
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeats):
        for case in names:
            for exchange in ("shared", "gloo"):
                options = ["--exchange", exchange, "--audit", str(share)]
                outcome = started(case, folder / f"{case}-{exchange}-{turn}", 3, num_steps, 0, *options)
                found.setdefault((case, exchange), []).append(overhead_of(outcome))
    rows = [[*names_, str(median_interval(values))] for names_, values in found.items()]
    print_table(["case", "exchange", f"audit {share:g}"], rows)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=10000)
    parser.add_argument("--cases", default="cnn,mlp_small,transformer")
    parser.add_argument("--seed", type=int, default=1, help="of who is killed, and where")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--share", type=float, default=SHARE, help="whose cost is measured")
    parser.add_argument("--only", choices=["alarms", "cost"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.be:
        train(given.be, given.steps, given.size)
        return
    figures, costs = dict[str, float](), dict[tuple[str, str], list[float]]()
    with tempfile.TemporaryDirectory(prefix="unisono-audits-") as folder:
        if given.only != "cost":
            figures |= false_alarms(Path(folder), given.leaves, given.cases.split(","), given.seed)
        if given.only != "alarms":
            costs = cost(Path(folder), given.share, given.repeats, given.steps, given.cases.split(","))
    figures |= {f"cost.{case}.{exchange}": statistics.median(values) for (case, exchange), values in costs.items()}
    print(figures)
    if given.json:
        runs = [{"case": case, "exchange": exchange, "cost": values} for (case, exchange), values in costs.items()]
        write_json(given.json, figures, [*runs, {"command": sys.argv}])


if __name__ == "__main__":
    main()
