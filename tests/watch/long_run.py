"""A long run that never was: its directory, as a run of so many steps and workers would leave it. For tests of views.

    python -m tests.watch.long_run DIRECTORY --steps 1000000 --workers 64

Lines, times and the use of machines are made by the classes that make them in a run; of what is kept of the newest
steps only, no more is made.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from unisono.core.events import (
    EvaluationFinished,
    Event,
    GpuUse,
    MachineJoined,
    MachineUsed,
    MembershipChanged,
    RunEnded,
    RunStarted,
    Seconds,
    StepFinished,
    WorkerGone,
    WorkerJoined,
    WorkerTimes,
    WorkerUse,
)
from unisono.record.chronicle import line_of
from unisono.record.journal import JOURNAL
from unisono.record.journal.lines import LineEvent, text_of, to_line
from unisono.record.journal.newest import MOST_RECORDS, Newest
from unisono.record.journal.times import TIMES, record_of
from unisono.record.rundir import EVENTS_FILE, USE_FILE

BEGIN = 1_790_000_000.0
STEP_S = 0.02
PER_HOST = 8
LOST_AT = 0.4
"""Part of the run after which the second worker is lost, and another one comes."""


def make_long_run(directory: Path, steps: int = 1_000_000, workers: int = 64, *, ended: bool = True) -> Path:
    """Make the directory of a run, and return it.

    Args:
        ended: the run has finished; else it seems to train.
    """
    directory.mkdir(parents=True, exist_ok=True)
    facts = {
        "run_id": "long",
        "schema": 1,
        "recipe": {"batch_size": 512, "microbatches": 64, "seed": 1},
        "command": {"folder": "/", "arguments": ["train.py"]},
    }
    (directory / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
    _write_journal(directory, steps, ended=ended)
    _write_times(directory, steps, workers)
    _write_use(directory, steps, workers)
    with (directory / EVENTS_FILE).open("w") as file:
        file.writelines(line_of(event, "long") + "\n" for event in story(directory, steps, workers, ended=ended))
    return directory


def step_of(number: int, steps: int, workers: dict[str, WorkerTimes] | None = None) -> StepFinished:
    """Return a step of the run: equal for equal numbers. One loss in 10,007 is not a number, one is far too high."""
    draw = random.Random(number)
    loss = 0.4 + 5.0 / (1.0 + number / steps * 40) + draw.gauss(0.0, 0.05)
    if number % 10_007 == 10_006:
        loss = math.nan
    elif number % 10_007 == 5_003:
        loss += 20.0
    wave = 1.0 + 0.2 * math.sin(number / steps * 60)
    seconds = [draw.random() * 1e-3, 0.011 * wave, 0.001, 0.002, 0.003 * wave, 0.001, 0.0001]
    spent = Seconds(**dict(zip(Seconds.__struct_fields__, (round(each, 6) for each in seconds), strict=False)))
    return StepFinished(
        time=round(BEGIN + number * STEP_S, 3), step=number, epoch=number * 10 // steps, loss=loss, weight=512.0,
        samples=512, digest=f"{draw.getrandbits(64):016x}", num_steps=steps, generation=1 + (number >= steps * LOST_AT),
        seconds=spent, means=spent,
        workers=workers or {}, logs={"lr": 0.1 * 0.5 ** (number * 10 // steps), "grad_norm": draw.lognormvariate(0, 1)},
        sent_bytes=1_000_000,
    )  # fmt: skip


def lines(steps: int, *, ended: bool) -> Iterator[LineEvent]:
    """Yield what has a line in the journal."""
    for number in range(steps):
        yield step_of(number, steps)
        if number % 5000 == 4999:
            right = 1.0 - 1.0 / (2.0 + number / steps * 20)
            yield EvaluationFinished(time=BEGIN + number * STEP_S, step=number + 1, totals={"accuracy": right})
    if ended:
        yield RunEnded(time=BEGIN + steps * STEP_S, ok=True, reason="", digests={"model": "5f3a" * 4})


def worker_ids(number: int, steps: int, workers: int) -> list[str]:
    """Return the workers of a step: one of them is another one after some time."""
    ids = [f"w{each}" for each in range(workers)]
    if number >= steps * LOST_AT and workers > 1:
        ids[1] = f"w{workers}"
    return ids


def times_of(number: int, steps: int, workers: int) -> dict[str, WorkerTimes]:
    """Return what the workers tell with a step; the last one is slower than all others."""
    draw = random.Random(number)
    slow = f"w{workers - 1}"
    found: dict[str, WorkerTimes] = {}
    for worker_id in worker_ids(number, steps, workers):
        compute = round((0.016 if worker_id == slow else 0.011) * draw.uniform(0.95, 1.05), 6)
        waiting = round(max(0.0, 0.0165 - compute), 6)
        last = Seconds(data=0.000312, compute=compute, exchange=0.001021, network=0.0012, waiting=waiting, update=0.001)
        found[worker_id] = WorkerTimes(
            leaves=1, data=last.data, compute=compute, last=last, waits_for="" if worker_id == slow else slow,
            waits_s=waiting, page_faults=0,
        )  # fmt: skip
    return found


def story(directory: Path, steps: int, workers: int, *, ended: bool) -> Iterator[Event]:
    """Yield what has happened besides steps."""
    hosts = [f"node{each}" for each in range(math.ceil(workers / PER_HOST))]
    for number, host in enumerate(hosts):
        yield MachineJoined(time=BEGIN - 9, agent_id=f"a{number}", host=host, num_workers=PER_HOST)
    for number in range(workers):
        yield WorkerJoined(
            time=BEGIN - 2, worker_id=f"w{number}", host=hosts[number // PER_HOST], device="cpu", pid=1000 + number,
            generation=1, step=0, reason="the run begins",
        )  # fmt: skip
    yield RunStarted(time=BEGIN - 1, run_id="long", directory=str(directory), step=0, recipe={"microbatches": 64})
    yield MembershipChanged(time=BEGIN - 1, generation=1, worker_ids=tuple(worker_ids(0, steps, workers)))
    if workers > 1:
        lost = int(steps * LOST_AT)
        when = BEGIN + lost * STEP_S
        reason = "its process has died (signal 9, SIGKILL)"
        yield WorkerGone(time=when, worker_id="w1", host=hosts[0], how="lost", reason=reason, step=lost - 1)
        yield WorkerJoined(
            time=when + 0.5, worker_id=f"w{workers}", host=hosts[0], device="cpu", pid=3000, generation=2, step=lost,
            reason="w1 was lost",
        )  # fmt: skip
        ids = tuple(worker_ids(lost, steps, workers))
        yield MembershipChanged(time=when + 0.6, generation=2, worker_ids=ids, reason="w1 was lost")
    if ended:
        yield RunEnded(time=BEGIN + steps * STEP_S, ok=True, reason="", digests={"model": "5f3a" * 4}, step=steps - 1)


def _write_journal(directory: Path, steps: int, *, ended: bool) -> None:
    with (directory / JOURNAL).open("wb") as journal:
        for number, event in enumerate(lines(steps, ended=ended)):
            journal.write(f"{text_of({'line': number, **to_line(event)})}\n".encode())


def _write_times(directory: Path, steps: int, workers: int) -> None:
    times = Newest(directory / TIMES)
    for number in range(max(0, steps - 2 * MOST_RECORDS), steps):
        times.add([record_of(step_of(number, steps, times_of(number, steps, workers)))])


def _write_use(directory: Path, steps: int, workers: int) -> None:
    use = Newest(directory / USE_FILE)
    last = max(1, int(steps * STEP_S))
    for second in range(max(0, last - 10 * MOST_RECORDS), last, 10 if last > 100 else 1):
        use.add([msgspec.json.encode([*use_of(second, workers)])])


def use_of(second: int, workers: int) -> Iterator[MachineUsed]:
    """Yield what each machine uses."""
    draw = random.Random(second)
    for host in range(math.ceil(workers / PER_HOST)):
        ids = [f"w{each}" for each in range(host * PER_HOST, min(workers, (host + 1) * PER_HOST))]
        yield MachineUsed(
            time=BEGIN + second, host=f"node{host}", cores=len(ids) * draw.uniform(0.7, 0.9), num_cores=16,
            memory_bytes=int(20e9 + 1e6 * second), memory_total_bytes=64 << 30,
            sent_bytes_per_s=5e7 * draw.random(), received_bytes_per_s=5e7 * draw.random(),
            gpus=[GpuUse(utilization=draw.random(), memory_bytes=10 << 30, memory_total_bytes=80 << 30)],
            workers={each: WorkerUse(cores=draw.uniform(0.7, 0.9), memory_bytes=2 << 30) for each in ids},
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the directory of a long run that never was.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--training", action="store_true", help="the run has not ended")
    arguments = parser.parse_args()
    print(make_long_run(arguments.directory, arguments.steps, arguments.workers, ended=not arguments.training))


if __name__ == "__main__":
    main()
