"""Checks that pass or fail: the exchanges' conformance tests, the same bits on any number of workers, lost workers."""

from __future__ import annotations

import functools
import importlib.util
import math
import shutil
import statistics
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.report import Result, shortened
from benchmarks.gpu.training import CASES, COMPILER, DEVICE, abilities
from unisono.record.journal import Difference, compare, read
from unisono.system.lifetime import run_bound
from unisono.testing import Faults

__all__ = ["ROOT", "Check", "OutOfTime", "Place", "exchanges", "recovery", "run_words", "same_bits"]

ROOT: Final = Path(__file__).resolve().parents[2]
INTERRUPTED: Final = ("plain", "compiled graphs")
"""Cases in which a worker is killed as well, and which are resumed."""


class OutOfTime(Exception):
    """No time is left for a check: it belongs to the next call."""


@dataclass(frozen=True)
class Check:
    """What is checked, or measured, as one: all of its results, or none, are in a report."""

    name: str
    results: Callable[[], Iterator[Result]]


@dataclass(frozen=True)
class Place:
    """Where everything is tried."""

    device: str
    num_gpus: int
    folder: Path
    limit_s: float
    """Of one command."""
    module: str = ""
    """Is imported by each process; it makes the device known to torch."""
    ends: float = math.inf
    """When no command runs any more, by `time.monotonic`."""

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of a script that say where it computes."""
        return "--device", self.device, *(["--import", self.module] if self.module else [])

    @property
    def is_large(self) -> bool:
        """Whether figures are those of a device as people train on."""
        return {DEVICE, COMPILER} <= abilities(self.device)

    def left_s(self) -> float:
        """Return how long a command may take that begins now.

        Raises:
            OutOfTime: it may not begin.
        """
        if (left_s := self.ends - time.monotonic()) <= 0:
            raise OutOfTime
        return min(self.limit_s, left_s)

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Return the exit code and the output of a command. It ends with this process, or at the limit with -1.

        Raises:
            OutOfTime: it would have been allowed to take longer than the time that was left.
        """
        limit_s = self.left_s()
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        done = run_bound([*(["env", *variables] if variables else []), *map(str, command)], limit_s)
        output = f"{done.output}{done.errors}"
        if done.code is not None:
            return done.code, output
        if limit_s < self.limit_s:
            raise OutOfTime
        return -1, f"{output}\nit took longer than {self.limit_s:g} s"


def exchanges(place: Place) -> Check:
    """Return the check of every exchange, on this device."""
    return Check("exchanges", lambda: _exchanges(place))


def _exchanges(place: Place) -> Iterator[Result]:
    """Run ``tests/gpu``: every exchange, on this device."""
    if missing := [name for name in ("pytest", "pytest_timeout") if not _has(name)]:
        yield Result("exchanges", "skipped", words=f"{' and '.join(missing)} is not installed: pip install '.[test]'")
        return
    found = place.folder / "exchanges.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={found}"]
    began = time.monotonic()
    _, output = place.run(
        *command, f"--rootdir={ROOT}", "-c", ROOT / "pyproject.toml", ROOT / "tests" / "gpu" / "test_exchange.py"
    )
    if not found.exists():
        yield Result("exchanges", "failed", time.monotonic() - began, shortened(output))
        return
    for case in ElementTree.parse(found).getroot().iter("testcase"):
        failure = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        name, seconds = f"exchange: {case.get('name', '')}", float(case.get("time", 0))
        if failure is None:
            yield Result(name, "passed", seconds)
        else:
            text = failure.get("message", "") if failure.tag == "skipped" else failure.text or ""
            yield Result(name, "skipped" if failure.tag == "skipped" else "failed", seconds, shortened(text))


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# -- the same bits -------------------------------------------------------------------------------------


def same_bits(place: Place, names: Sequence[str] | None = None, most: int = 0) -> list[Check]:
    """Return the checks of the training of each case, alone and on several workers.

    Args:
        most: only so many of the teams; 0: all.
    """
    teams = dict(list(_teams(place.num_gpus).items())[: most or None])
    return [
        Check(f"same bits: {name}", functools.partial(_same, place, name, teams))
        for name in CASES
        if names is None or name in names
    ]


def _teams(num_gpus: int) -> dict[str, int]:
    """Return by name the numbers of workers that are compared with one."""
    if num_gpus > 1:
        return {f"{num_gpus} GPUs (NCCL)": num_gpus, "more workers than GPUs": num_gpus + 1}
    return {"2 workers": 2, "3 workers": 3}


def _same(place: Place, name: str, teams: Mapping[str, int]) -> Iterator[Result]:
    case, title = CASES[name], f"same bits: {name} ({CASES[name].says})"
    if missing := case.needs - abilities(place.device):
        yield Result(title, "skipped", words=f"{place.device} has no {' and no '.join(sorted(missing))}")
        return
    folder, began = place.folder / name.replace(" ", "-"), time.monotonic()
    code, output = _train(place, name, folder / "alone", 1)
    yield _result(f"{title}: alone", began, "" if code == 0 else shortened(output))
    if code:
        return
    tries: dict[str, tuple[int, str, dict[str, str]]] = {team: (number, "", {}) for team, number in teams.items()}
    if name in INTERRUPTED and len(teams) > 1:
        kill = Faults().kill("w1", step=3, at="after_backward").environment()
        tries["a worker is killed"] = 2, "", kill
        if earlier := sorted((folder / "alone" / "checkpoints").glob("step-*"))[:-1]:
            tries["resumed"] = 2, str(earlier[-1]), {}
        else:
            yield Result(f"{title}: resumed", "failed", words="the run alone left no checkpoint before its last step")
    for number, (team, (workers, resume, environment)) in enumerate(tries.items()):
        began, directory = time.monotonic(), folder / str(number)
        shares = ["--even"] if environment else []  # a worker that is to be killed in a micro-batch has one
        code, output = _train(place, name, directory, workers, resume, environment, shares)
        yield _result(
            f"{title}: {team}", began, shortened(output) if code else _difference(folder / "alone", directory)
        )
    shutil.rmtree(folder, ignore_errors=True)


def _train(
    place: Place,
    name: str,
    directory: Path,
    workers: int,
    resume: str = "",
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> tuple[int, str]:
    command = run_words("benchmarks.gpu.training", directory, workers)
    command += ["--resume", resume] if resume else []
    return place.run(*command, "--", name, *place.words, *arguments, environment=environment)


def run_words(module: str, directory: Path, workers: int) -> list[str]:
    """Return the words of a run of one of the modules here, without the arguments of the module."""
    command = [sys.executable, "-m", "unisono", "run", "-m", module, "--workers", str(workers)]
    # A compiler works for a while, and its threads with it.
    command += ["--set", "heartbeat-timeout=60s", "--set", "go-on-without-after=300s", "--set", "kill-after=600s"]
    return [*command, "--run-dir", str(directory)]


def _difference(one: Path, other: Path) -> str:
    """Return where two runs part; "" where they are identical."""
    try:
        compare(one, other)
    except (Difference, OSError, ValueError) as error:
        return shortened(str(error))
    return ""


def _result(name: str, began: float, wrong: str) -> Result:
    return Result(name, "failed" if wrong else "passed", time.monotonic() - began, wrong)


# -- lost workers --------------------------------------------------------------------------------------------------

KILLS: Final = (("w1", 12), ("w2", 30), ("w3", 48))
"""Worker and step: each is the replacement of the one before."""
KILLED_STEPS: Final = 64
FEW_KILLS: Final = (("w1", 3),)
FEW_STEPS: Final = 16
"""Where it is only tried whether the programme works."""


def recovery(place: Place) -> Check:
    """Return the check of a training whose workers are killed one after the other: what each loss has cost."""
    return Check("recovery", lambda: _recovery(place))


def _recovery(place: Place) -> Iterator[Result]:
    kills = KILLS if place.is_large else FEW_KILLS
    steps = ("--even", "--steps", str(KILLED_STEPS if place.is_large else FEW_STEPS))
    folder, began = place.folder / "recovery", time.monotonic()
    code, output = _train(place, "plain", folder / "alone", 1, arguments=steps)
    yield _result("recovery: alone", began, shortened(output) if code else "")
    if code:
        return
    faults, began = Faults(), time.monotonic()
    for worker, step in kills:
        faults = faults.kill(worker, step=step, at="after_backward")
    code, output = _train(place, "plain", folder / "killed", 2, environment=faults.environment(), arguments=steps)
    yield _result(
        "recovery: the same bits",
        began,
        shortened(output) if code else _difference(folder / "alone", folder / "killed"),
    )
    if code:
        return
    interruptions = [event for event in read(folder / "killed" / "events.jsonl") if event["kind"] == "interruption"]
    for what, said in (("is killed", "was killed"), ("joins", " joins;")):
        # A replacement that joins before the next step is finished makes one interruption with the loss, of both kinds.
        found = [event["seconds"] for event in interruptions if said in event["reason"]]
        name = f"recovery: a worker {what}"
        if not found:
            yield Result(name, "failed", words="the run says nothing of it")
            continue
        median_ms = 1e3 * statistics.median(found)
        words = f"a step is {median_ms:.1f} ms longer (median of {len(found)})"
        yield Result(name, "measured", words=words, figures={"ms": median_ms})
    shutil.rmtree(folder, ignore_errors=True)
