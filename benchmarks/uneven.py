"""Throughput when workers are not equally fast, as a fraction of the sum of their speeds, and against DDP.

python -m benchmarks.uneven                              # everything
python -m benchmarks.uneven --quick --json uneven.json   # three of the cases, under five minutes
python -m benchmarks.uneven --cases two_2x,changing
python -m benchmarks.uneven --curve                      # samples a second by number of micro-batches

A worker is made slow by stopping and continuing its process in a fine rhythm, so that it gets one half (or one quarter)
of the processor time that it would get otherwise; the script and the library know nothing of it. That is measured
against what the other workers get, so it holds on a machine with fewer cores than workers, and on one where others
work too.

The **ideal** is the sum of the workers' speeds. They are measured in turns with what is compared: the same number of
processes, one of them slowed in the same way, each with a plain loop of its own and without any exchange. So it is an
ideal without exchange, without waiting, and without whole micro-batches; ``whole_microbatches.CASE`` is the fraction
that a plan of whole micro-batches can reach at best at these speeds.

Every run must have the digests of a calm run of one worker, step by step; otherwise this ends with an error.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import median_interval, print_table, write_json
from benchmarks.step_time import Team, _cpu_s, _receive, started
from unisono.core.balance import balanced
from unisono.record.journal import read
from unisono.record.journal.times import by_step

MODEL = "cnn"
ADAPT_STEPS = 12
"""Of every side before it is measured: in the steady cases the plan has found the speeds by then."""
SPELL_STEPS = 20
"""In the case `changing`, how long the worker is slow, and then fast."""
CURVE_BATCH = 256
CURVE_MICROBATCHES = (2, 4, 8, 16, 32, 64)
"""Of which the curve is made: global batch, and cuts of it."""
TICK_S = 0.002
BURST_S = 0.004
"""Of processor time, that a slowed worker has used when it is stopped."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One worker, the last, is ``slow`` times as slow as the others."""

    workers: int
    slow: float
    microbatches: int = 16
    changing: bool = False
    microbatch_size: int = 0
    """Samples; 0: the model's."""


CASES = {
    "two_2x": Case(workers=2, slow=2, microbatches=32),
    "two_4x": Case(workers=2, slow=4, microbatches=32),
    # 16 micro-batches at speeds 2 : 2 : 2 : 1 leave 9% to whole micro-batches, 28 nothing.
    "four_2x": Case(workers=4, slow=2, microbatches=28),
    "four_4x": Case(workers=4, slow=4),
    "changing": Case(workers=2, slow=4, changing=True),
}


class Throttle:
    """Gives one worker of a side a part of the processor time that its peers get, by stopping and continuing it."""

    def __init__(self, team: Team) -> None:
        self._slowed, self._peers = team.pids[-1], team.pids[:-1]
        self._slow = 1.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)
        self._thread.start()

    def set(self, slow: float) -> None:
        """From now on the worker is ``slow`` times as slow as it would be."""
        self._slow = slow

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        stopped, credit, rate = False, BURST_S, 1.0
        then, used = time.perf_counter(), _cpu_s(self._slowed)
        looked, had = then, self._ran_and_waited()
        while not self._over.wait(TICK_S):
            now, total = time.perf_counter(), _cpu_s(self._slowed)
            # Of processor time that was not wanted, little is kept: a machine is not faster after a rest.
            credit = min(credit + (now - then) * rate / self._slow - (total - used), BURST_S)
            then, used = now, total
            if now - looked > 0.5:
                have = self._ran_and_waited()
                ran, waited = have[0] - had[0], have[1] - had[1]
                if ran > 0.05e9:
                    rate = ran / (ran + waited)
                looked, had = now, have
            if stopped != (wanted := self._slow > 1.0 and credit < (BURST_S * 0.9 if stopped else 0.0)):
                stopped = wanted
                self._signal(signal.SIGSTOP if stopped else signal.SIGCONT)
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._slowed, number)

    def _ran_and_waited(self) -> tuple[int, int]:
        """Nanoseconds that the peers' main threads had a processor, and wanted one."""
        ran = waited = 0
        for pid in self._peers:
            with suppress(OSError):
                a, b, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
                ran, waited = ran + int(a), waited + int(b)
        return ran, waited


class Sides:
    """The sides of one case, and what a turn of each of them gives."""

    def __init__(self, case: Case, teams: Sequence[Team], throttles: Sequence[Throttle], num_steps: int) -> None:
        self._case = case
        self._teams = {team.name: team for team in teams}
        self._throttles = dict(zip(self._teams, throttles, strict=True))
        self._num_steps = num_steps

    @property
    def names(self) -> list[str]:
        return list(self._teams)

    def set(self, slow: float) -> None:
        for throttle in self._throttles.values():
            throttle.set(slow)

    def step_s(self, name: str) -> float:
        """Seconds of a step, in the mean; the first finds cold caches and does not count."""
        return statistics.fmean(self._teams[name].steps(self._num_steps + 1)[1:])

    def spells_s(self, name: str) -> dict[str, float]:
        """Seconds of all steps of a slow spell and the fast one that follows."""
        team, throttle = self._teams[name], self._throttles[name]
        team.steps(1)
        throttle.set(self._case.slow)
        slow = sum(team.steps(SPELL_STEPS))
        throttle.set(1.0)
        return {"slow": slow, "fast": sum(team.steps(SPELL_STEPS))}

    def paces_s(self, seconds: float) -> list[float]:
        """By worker, seconds for a micro-batch when everybody works for themselves at the same time."""
        team = self._teams["alone"]
        for pipe in team.pipes:
            pipe.send(seconds)
        own = self._case.microbatches // self._case.workers
        return [statistics.fmean(_receive(pipe, team)["times"]) / own for pipe in team.pipes]


def ideal_s(paces: Sequence[float], microbatches: int) -> float:
    """Seconds of a step at the sum of the speeds."""
    return microbatches / sum(1 / pace for pace in paces)


def whole_s(paces: Sequence[float], microbatches: int) -> float:
    """The same, when nobody computes a part of a micro-batch."""
    unit = max(paces) / 256
    plan = balanced(tuple(max(1, round(pace / unit)) for pace in paces), microbatches)
    return max(len(own) * pace for own, pace in zip(plan.ranges, paces, strict=True))


def commands(side: str, case: Case, directory: Path | None = None) -> Callable[[Path], list[list[str]]]:
    """How the processes of a side are started."""

    def of(folder: Path) -> list[list[str]]:
        size = case.workers
        kind = {"unbalanced": "unisono", "calm": "unisono", "alone": "plain"}.get(side, side)
        own = case.microbatches // size if side == "alone" else case.microbatches
        # The same allocator on all sides: that is not what is compared here.
        words = [kind, MODEL, "--microbatches", str(own), "--keep-freed-memory"]
        words += ["--control", str(folder / f"{side}.socket")]
        if case.microbatch_size:
            words += ["--microbatch-size", str(case.microbatch_size)]
        module = [sys.executable, "-m", "benchmarks.sides"]
        if side == "calm":
            return [[*module, *words, "--directory", str(directory)]]
        if kind == "unisono":
            head = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.sides", "--workers", str(size)]
            extra = ["--unbalanced"] if side == "unbalanced" else []
            return [[*head, "--run-dir", str(directory or folder / side), "--", *words, *extra]]
        meeting = ["--workers", str(size), "--meeting", str(folder / "meeting")] if side == "ddp" else []
        return [[*module, *words, *meeting, "--rank", str(rank)] for rank in range(size)]

    return of


@contextmanager
def ready(names: Sequence[str], case: Case, directory: Path, num_steps: int) -> Iterator[Sides]:
    """All sides of a case, slow where they shall be; at the end they finish."""
    sides = {name: commands(name, case, directory / name if name != "ddp" else None) for name in names}
    with started(sides, case.workers) as teams:
        throttles: list[Throttle] = []
        try:
            throttles += [Throttle(team) for team in teams]
            prepared = Sides(case, teams, throttles, num_steps)
            if not case.changing:
                prepared.set(case.slow)
            for team in teams:
                team.steps(ADAPT_STEPS if team.name != "alone" else 1)
            yield prepared
        finally:
            for throttle in throttles:
                throttle.end()
        for team in teams:
            team.finish()


def digests(directory: Path) -> list[str]:
    return [line["digest"] for line in read(directory) if line["kind"] == "step"]


class Calm:
    """The digests of a run of one worker, which nobody slows down."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check(self, name: str, microbatches: int, found: Sequence[str]) -> int:
        """Raise if a run has other digests than the calm one; returns how many steps were compared."""
        directory = self._directory / f"calm-{name}"
        case = Case(workers=1, slow=1, microbatches=microbatches)
        with started({"calm": commands("calm", case, directory)}, 1) as (team,):
            team.steps(len(found))
            team.finish()
        for number, (ours, theirs) in enumerate(zip(found, digests(directory), strict=False)):
            if ours != theirs:
                raise SystemExit(f"{name}: step {number} has digest {ours}, and {theirs} in a calm run of one worker")
        return len(found)


def steady(case: Case, sides: Sides, limit_s: float, num_turns: int) -> list[dict[str, Any]]:
    """Turns at one speed for all the time."""
    turns: list[dict[str, Any]] = []
    start = time.monotonic()
    while len(turns) < num_turns or time.monotonic() - start < limit_s:
        turn: dict[str, Any] = {}
        for name in sides.names if len(turns) % 2 == 0 else reversed(sides.names):
            turn[name] = sides.paces_s(0.6 * case.workers) if name == "alone" else sides.step_s(name)
        turn["ideal"] = ideal_s(turn["alone"], case.microbatches)
        turn["whole"] = whole_s(turn["alone"], case.microbatches)
        turns.append(turn)
    return turns


def changing(case: Case, sides: Sides, limit_s: float, num_turns: int) -> list[dict[str, Any]]:
    """Turns in which a worker becomes slow and fast again."""
    turns: list[dict[str, Any]] = []
    start = time.monotonic()
    while len(turns) < num_turns or time.monotonic() - start < limit_s:
        turn: dict[str, Any] = {}
        for name in sides.names if len(turns) % 2 == 0 else reversed(sides.names):
            if name != "alone":
                turn[f"{name}_spells"] = sides.spells_s(name)
                turn[name] = sum(turn[f"{name}_spells"].values())
                continue
            turn["alone"] = {"fast": sides.paces_s(1.0)}
            sides.set(case.slow)
            turn["alone"]["slow"] = sides.paces_s(1.0)
            sides.set(1.0)
        for key, seconds in (("ideal", ideal_s), ("whole", whole_s)):
            turn[key] = sum(SPELL_STEPS * seconds(paces, case.microbatches) for paces in turn["alone"].values())
        turns.append(turn)
    return turns


def measure(name: str, calm: Calm, directory: Path, quick: bool) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """One case: its figures, its turns, and its row for the table."""
    case = CASES[name]
    num_steps, num_turns, limit_s = (5, 3, 0.0) if quick else (12, 10, 90.0)
    with ready(["unisono", "alone", "ddp"], case, directory / name, num_steps) as sides:
        turns = (changing if case.changing else steady)(case, sides, limit_s, num_turns)
    place = directory / name / "unisono"
    lines = [line for line in read(place) if line["kind"] == "step"]
    num_compared = calm.check(name, case.microbatches, [line["digest"] for line in lines][: 40 if quick else None])
    fraction = median_interval([turn["ideal"] / turn["unisono"] for turn in turns])
    speedup = median_interval([turn["ddp"] / turn["unisono"] for turn in turns])
    whole = statistics.median(turn["ideal"] / turn["whole"] for turn in turns)
    figures = {
        f"fraction_of_ideal.{name}": fraction.median,
        f"fraction_of_ideal_low.{name}": fraction.low,
        f"fraction_of_ideal_high.{name}": fraction.high,
        f"whole_microbatches.{name}": whole,
        f"speedup_to_ddp.{name}": speedup.median,
        f"speedup_to_ddp_low.{name}": speedup.low,
        f"speedup_to_ddp_high.{name}": speedup.high,
    }
    # By worker, and then for how many steps one after the other.
    plans = ([worker["leaves"] for worker in workers.values()] for workers in by_step(place).values())
    run = {
        "case": name,
        "model": MODEL,
        "microbatches": case.microbatches,
        "compared_steps": num_compared,
        "leaves": [[*plan, len([*steps])] for plan, steps in itertools.groupby(plans)],
        "turns": turns,
    }
    return figures, run, [name, str(case.microbatches), str(fraction), f"{whole:.3f}", str(speedup)]


def measure_equal(calm: Calm, directory: Path, quick: bool) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """What it costs to measure and to plan when all workers are equally fast."""
    case = Case(workers=2, slow=1)
    num_steps, num_turns, limit_s = (8, 4, 0.0) if quick else (16, 15, 60.0)
    turns: list[dict[str, float]] = []
    with ready(["unisono", "unbalanced"], case, directory / "equal", num_steps) as sides:
        start = time.monotonic()
        while len(turns) < num_turns or time.monotonic() - start < limit_s:
            order = sides.names if len(turns) % 2 == 0 else list(reversed(sides.names))
            turns.append({name: sides.step_s(name) for name in order})
    found = digests(directory / "equal" / "unisono")
    num_compared = calm.check("equal", case.microbatches, found[: 40 if quick else None])
    if found != digests(directory / "equal" / "unbalanced"):
        raise SystemExit("equal: with and without balance the digests differ")
    cost = median_interval([turn["unbalanced"] / turn["unisono"] for turn in turns])
    figures = {"cost_when_equal": cost.median, "cost_when_equal_low": cost.low, "cost_when_equal_high": cost.high}
    run = {"case": "equal", "model": MODEL, "microbatches": 16, "compared_steps": num_compared, "turns": turns}
    return figures, run, ["equal (balance=False)", str(case.microbatches), "", "", str(cost)]


def measure_curve(quick: bool) -> dict[str, float]:
    """Samples a second by the number of micro-batches of the same global batch, for equal and for uneven workers."""
    figures: dict[str, float] = {}
    cases = {
        f"m{number}": Case(workers=2, slow=1, microbatches=number, microbatch_size=CURVE_BATCH // number)
        for number in CURVE_MICROBATCHES
    }
    seconds: dict[str, list[float]] = {}
    with ExitStack() as doors:
        folder = Path(doors.enter_context(tempfile.TemporaryDirectory(prefix="unisono-uneven-")))
        sides = {
            name: doors.enter_context(ready(["unisono"], case, folder / name, 4 if quick else 12))
            for name, case in cases.items()
        }
        for _ in range(3 if quick else 8):
            for slow in (1.0, 2.0, 4.0):
                for name, side in sides.items():
                    side.set(slow)
                    side.step_s("unisono")  # the plan follows
                    seconds.setdefault(f"{name}.{slow:.0f}x", []).append(side.step_s("unisono"))
                    side.set(1.0)
    for name, times in seconds.items():
        figures[f"samples_per_s.{name}"] = CURVE_BATCH / statistics.median(times)
    return figures


QUICK = ("two_2x", "changing", "equal")
HEADER = ("case", "M", "of the ideal (95%)", "whole micro-batches", "DDP's time (95%)")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns; 40 steps of each case are compared")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    parser.add_argument(
        "--cases", metavar="A,B", help=f"of {', '.join([*CASES, 'equal'])}; all, or with --quick {', '.join(QUICK)}"
    )
    parser.add_argument("--curve", action="store_true", help="instead: samples a second by number of micro-batches")
    options = parser.parse_args(arguments)
    if options.curve:
        curve = measure_curve(options.quick)
        rows = [
            [str(number), *(f"{curve[f'samples_per_s.m{number}.{slow}x']:.0f}" for slow in (1, 2, 4))]
            for number in CURVE_MICROBATCHES
        ]
        print_table(("M", "equal", "one 2x slow", "one 4x slow"), rows)
        if options.json:
            write_json(options.json, curve, [])
        return
    names = options.cases.split(",") if options.cases else list(QUICK) if options.quick else [*CASES, "equal"]
    unknown = set(names) - {*CASES, "equal"}
    if unknown:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join([*CASES, 'equal'])}")
    runs, figures, rows = [], {}, []
    with tempfile.TemporaryDirectory(prefix="unisono-uneven-") as folder:
        calm = Calm(Path(folder))
        for name in names:
            if name == "equal":
                found, run, row = measure_equal(calm, Path(folder), options.quick)
            else:
                found, run, row = measure(name, calm, Path(folder), options.quick)
            figures.update(found)
            runs.append(run)
            rows.append(row)
            print("  ".join(row), file=sys.stderr, flush=True)
    print_table(HEADER, rows)
    if options.json:
        write_json(options.json, figures, runs)


if __name__ == "__main__":
    main()
