"""Checks that pass or fail: the exchanges' conformance tests, and the same bits on any number of workers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.report import Result, shortened
from benchmarks.gpu.training import CASES
from unisono.record.journal import Difference, compare
from unisono.system.lifetime import PARENT
from unisono.testing import Faults

__all__ = ["ROOT", "Place", "exchanges", "same_bits"]

ROOT: Final = Path(__file__).resolve().parents[2]
INTERRUPTED: Final = ("plain", "compiled graphs")
"""Cases in which a worker is killed as well, and which are resumed."""


@dataclass(frozen=True)
class Place:
    """Where everything is tried."""

    device: str
    num_gpus: int
    folder: Path
    limit_s: float
    """Of one command."""

    def run(self, *command: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
        """Return the exit code and the output of a command. It ends with this process, or at the limit with -1."""
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        own = {**os.environ, "PYTHONPATH": path, PARENT: str(os.getpid()), **(environment or {})}
        if self.device == "cpu":
            own["CUDA_VISIBLE_DEVICES"] = ""
        process = subprocess.Popen(
            command, cwd=self.folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return -1, f"{output}\nit took longer than {self.limit_s:g} s"
        return process.returncode, output


def exchanges(place: Place) -> Iterator[Result]:
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


def same_bits(place: Place, names: Sequence[str] | None = None, most: int = 0) -> list[Iterator[Result]]:
    """Return the checks of the training of each case, alone and on several workers.

    Args:
        most: only so many of the teams; 0: all.
    """
    teams = list(_teams(place.num_gpus).items())[: most or None]
    return [_same(place, name, dict(teams)) for name in CASES if names is None or name in names]


def _teams(num_gpus: int) -> dict[str, int]:
    """Return by name the numbers of workers that are compared with one."""
    if num_gpus > 1:
        return {f"{num_gpus} GPUs (NCCL)": num_gpus, "more workers than GPUs": num_gpus + 1}
    return {"2 workers": 2, "3 workers": 3}


def _same(place: Place, name: str, teams: Mapping[str, int]) -> Iterator[Result]:
    case, title = CASES[name], f"same bits: {name} ({CASES[name].says})"
    if case.cuda_only and place.device != "cuda":
        yield Result(title, "skipped", words="on a GPU only")
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
        code, output = _train(place, name, directory, workers, resume, environment)
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
) -> tuple[int, str]:
    command = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.gpu.training", "--workers", str(workers)]
    command += ["--run-dir", str(directory), *(["--resume", resume] if resume else [])]
    # A compiler works for a while, and its threads with it.
    command += ["--set", "heartbeat-timeout=60s", "--set", "go-on-without-after=300s", "--set", "kill-after=600s"]
    return place.run(*command, "--", name, "--device", place.device, environment=dict(environment or {}))


def _difference(one: Path, other: Path) -> str:
    """Return where two runs part; "" where they are identical."""
    try:
        compare(one, other)
    except (Difference, OSError, ValueError) as error:
        return shortened(str(error))
    return ""


def _result(name: str, began: float, wrong: str) -> Result:
    return Result(name, "failed" if wrong else "passed", time.monotonic() - began, wrong)
