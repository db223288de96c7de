"""`make gpu-check`, as far as a machine without GPUs can try it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from benchmarks.gpu import checks
from benchmarks.gpu.report import Report, Result, text_of, without_names
from benchmarks.gpu.training import CASES
from tests.waiting import WAIT_S

MACHINE = {
    "gpus": [{"name": "A GPU", "memory_gib": 80.0, "capability": "9.0", "processors": 132}],
    "torch": "2.13.0",
    "python": "3.11.7",
    "cuda": "13.0",
    "cudnn": 9,
    "nccl": "2.29.3",
    "driver": "1",
    "system": "Linux",
    "machine": "x86_64",
    "cores": 16,
}


def test_the_programme_trains_compares_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--only", "same-bits"]
    command += ["--cases", "channels-last", "--teams", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=checks.ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert [one["outcome"] for one in report["results"]] == ["passed", "passed"]
    assert report["results"][1]["name"].endswith("2 workers")
    assert "2 passed, 0 failed" in (tmp_path / "gpu-report.txt").read_text()


def test_a_check_that_fails_is_reported_and_ends_no_other(tmp_path: Path) -> None:
    class Broken(checks.Place):
        def run(self, *command: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
            return 2, f"RuntimeError: {tmp_path}/some/kernel.py is broken on {socket.gethostname()}"

    place = Broken("cuda", 1, tmp_path, 1.0)
    found = [result for each in checks.same_bits(place) for result in each]
    assert [result.outcome for result in found] == ["failed"] * len(CASES)
    assert {result.words for result in found} == {"RuntimeError: .../kernel.py is broken on <host>"}


def test_runs_that_differ_are_a_failure(tmp_path: Path) -> None:
    class Unlike(checks.Place):
        """Leaves journals whose digests differ from run to run."""

        number = 0

        def run(self, *command: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
            directory = Path(str(command[command.index("--run-dir") + 1]))
            directory.mkdir(parents=True)
            Unlike.number += 1
            line = {"line": 0, "kind": "step", "step": 0, "loss": 1.0, "digest": f"{Unlike.number:016x}"}
            (directory / "journal.jsonl").write_text(json.dumps(line) + "\n")
            return 0, ""

    place = Unlike("cpu", 0, tmp_path, 1.0)
    found = [result for each in checks.same_bits(place, ["fused"]) for result in each]
    assert [result.outcome for result in found] == ["passed", "failed", "failed"]
    found = [result for each in checks.same_bits(place, ["plain"]) for result in each]
    assert [(result.name.rpartition(": ")[2], result.outcome) for result in found][1] == ("resumed", "failed")
    assert "no checkpoint before its last step" in found[1].words


def test_a_run_is_resumed_from_before_its_last_step(tmp_path: Path) -> None:
    class Kept(checks.Place):
        """Leaves the checkpoints of a run, and writes down from which one another run is resumed."""

        resumed: ClassVar[list[str]] = []

        def run(self, *command: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
            directory = Path(str(command[command.index("--run-dir") + 1]))
            for step in (4, 8):
                (directory / "checkpoints" / f"step-{step:010}").mkdir(parents=True)
            if "--resume" in command:
                Kept.resumed.append(Path(str(command[command.index("--resume") + 1])).name)
            return 0, ""

    for each in checks.same_bits(Kept("cpu", 0, tmp_path, 1.0), ["plain"]):
        assert len(list(each)) == 5
    assert Kept.resumed == ["step-0000000004"]


def test_with_several_gpus_each_worker_has_one() -> None:
    assert checks._teams(1) == {"2 workers": 2, "3 workers": 3}
    assert checks._teams(4) == {"4 GPUs (NCCL)": 4, "more workers than GPUs": 5}


def test_a_report_says_nothing_private() -> None:
    told = f'File "{Path.home()}/secret/train.py", line 3, on {socket.gethostname()} (10.1.2.3), /data/x/y.pt'
    said = without_names(told)
    for private in ("secret", str(Path.home()) + "/", socket.gethostname(), "10.1.2.3", "/data"):
        assert private not in said
    assert "train.py" in said
    assert os.sep not in without_names("a loss of 1.5 tokens")


def test_a_report_is_readable() -> None:
    report = Report("cuda", MACHINE)
    report.add(Result("same bits: plain: 2 workers", "passed", 3.0))
    report.add(Result("speed: plain", "measured", 0.0, "1,000 tokens/s", {"tokens_per_s": 1000.0}))
    report.add(Result("same bits: bf16: alone", "failed", 1.0, "first line\nsecond line"))
    assert report.num_failed == 1
    lines = text_of(report).splitlines()
    assert lines[1] == "GPUs: A GPU (80.0 GiB, 9.0)"
    assert "failed    same bits: bf16: alone          1.0 s  first line" in lines
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"
