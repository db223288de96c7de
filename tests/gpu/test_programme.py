"""`make gpu-check`, as far as a machine without GPUs can try it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.report import Report, Result, html_of, read, text_of, without_names, write
from benchmarks.gpu.training import CASES
from tests.waiting import WAIT_S, wait_until
from tests.workers.conftest import MARK, marked

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


PROGRAMME = (sys.executable, "-m", "benchmarks.gpu")
EMULATED = ("--device", "emu", "--import", "tests.emulated.accelerator")


def check(*arguments: str, out: Path) -> tuple[str, list[Result]]:
    """Return what the programme prints, and the results in its report."""
    command = [*PROGRAMME, *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=checks.ROOT, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read(out)
    return done.stdout, report.rows if report is not None else []


@pytest.mark.more
def test_the_programme_trains_compares_and_reports(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--only", "same-bits", "--cases", "channels-last", "--teams", "1")
    said, results = check(*arguments, "--within-s", "0.1", out=tmp_path)
    assert "not checked yet: same bits: channels-last; the same command goes on" in said
    assert results == []
    said, results = check(*arguments, out=tmp_path)
    assert [one.outcome for one in results] == ["passed", "passed"]
    assert results[1].name.endswith("2 workers")
    assert "2 passed, 0 failed" in (tmp_path / "gpu-report.txt").read_text()
    assert '<td class="v passed">passed</td>' in (tmp_path / "gpu-report.html").read_text()
    assert check(*arguments, out=tmp_path)[0].startswith("same bits: channels-last: was checked before\n")


@pytest.mark.more
def test_workers_that_compile_get_the_same_bits_even_if_they_are_asked_to_measure(tmp_path: Path) -> None:
    """It takes a C++ compiler."""
    arguments = ("--device", "cpu", "--only", "same-bits", "--cases", "max-autotune", "--teams", "1")
    said, results = check(*arguments, out=tmp_path)
    assert [one.outcome for one in results] == ["passed"] * 2, said


@pytest.mark.more
def test_an_emulated_device_takes_the_programme_to_its_end(tmp_path: Path) -> None:
    arguments = (
        "--only",
        "same-bits",
        "recovery",
        "speed",
        "together",
        "--cases",
        "channels-last",
        "fp16",
        "recomputed",
    )
    said, results = check(*EMULATED, *arguments, "--teams", "1", out=tmp_path)
    assert Counter(one.verdict for one in results) == {"passed": 8, "measured": 9, "skipped": 1}, said
    rates = [one.figures["tokens_per_s"] for one in results if "tokens_per_s" in one.figures]
    assert len(rates) == 4
    assert min(rates) > 0


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_nothing_stays_behind_when_it_is_stopped(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, folder = uuid.uuid4().hex, tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    command = [*PROGRAMME, *EMULATED, "--only", "speed", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=checks.ROOT, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: " ".join(marked(mark).values()).count("benchmarks.gpu.sides") == 4, "four sides are there")
        assert list(folder.iterdir())
        process.send_signal(number)
        assert process.wait(WAIT_S) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not marked(mark) and not list(folder.iterdir()), "all processes and files are gone")


@pytest.mark.parametrize("arguments", [("--device", "nonsense"), ("--device", "emu", "--import", "no.such.module")])
def test_a_device_that_is_not_there_is_refused_in_words(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [*PROGRAMME, *arguments, "--out", str(tmp_path)]
    refused = subprocess.run(command, cwd=checks.ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert refused.returncode == 2
    assert f"error: --device {arguments[1]} cannot be used: " in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_report_of_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    write(Report("cpu", MACHINE), tmp_path)
    command = [*PROGRAMME, "--device", "cpu", "--out", str(tmp_path)]
    refused = subprocess.run(command, cwd=checks.ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert refused.returncode == 2
    assert "is of another machine or other versions; give --anew, or --out" in refused.stderr
    (tmp_path / "gpu-report.json").write_text("{}")
    with pytest.raises(ValueError, match=r"gpu-report\.json cannot be read"):
        read(tmp_path)


def test_a_check_that_fails_is_reported_and_ends_no_other(tmp_path: Path) -> None:
    class Broken(checks.Place):
        def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
            return 2, f"RuntimeError: {tmp_path}/some/kernel.py is broken on {socket.gethostname()}"

    place = Broken("cuda", 1, tmp_path, 1.0)
    found = [result for each in checks.same_bits(place) for result in each.results()]
    assert [result.outcome for result in found] == ["failed"] * len(CASES)
    assert {result.words for result in found} == {"RuntimeError: .../kernel.py is broken on <host>"}


def test_runs_that_differ_are_a_failure(tmp_path: Path) -> None:
    class Unlike(checks.Place):
        """Leaves journals whose digests differ from run to run."""

        number = 0

        def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
            directory = Path(str(command[command.index("--run-dir") + 1]))
            directory.mkdir(parents=True)
            Unlike.number += 1
            line = {"line": 0, "kind": "step", "step": 0, "loss": 1.0, "digest": f"{Unlike.number:016x}"}
            (directory / "journal.jsonl").write_text(json.dumps(line) + "\n")
            return 0, ""

    place = Unlike("cpu", 0, tmp_path, 1.0)
    found = [result for each in checks.same_bits(place, ["fused"]) for result in each.results()]
    assert [result.outcome for result in found] == ["passed", "failed", "failed"]
    found = [result for each in checks.same_bits(place, ["plain"]) for result in each.results()]
    assert [(result.name.rpartition(": ")[2], result.outcome) for result in found][1] == ("resumed", "failed")
    assert "no checkpoint before its last step" in found[1].words


def test_a_run_is_resumed_from_before_its_last_step(tmp_path: Path) -> None:
    class Kept(checks.Place):
        """Leaves the checkpoints of a run, and writes down from which one another run is resumed."""

        resumed: ClassVar[list[str]] = []

        def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
            directory = Path(str(command[command.index("--run-dir") + 1]))
            for step in (4, 8):
                (directory / "checkpoints" / f"step-{step:010}").mkdir(parents=True)
            if "--resume" in command:
                Kept.resumed.append(Path(str(command[command.index("--resume") + 1])).name)
            return 0, ""

    for each in checks.same_bits(Kept("cpu", 0, tmp_path, 1.0), ["plain"]):
        assert len(list(each.results())) == 5
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


def test_a_report_is_readable(tmp_path: Path) -> None:
    report = Report("cuda", MACHINE)
    report.add("plain", [Result("same bits: plain: 2 workers", "passed", 3.0)], "of yesterday")
    report.add("speed", [Result("speed: plain", "measured", 0.0, "0.9 of <it>", {"ratio": 0.9}, 0.98)], "of today")
    report.add("bf16", [Result("same bits: bf16: alone", "failed", 1.0, "first line\n</pre><script>")], "of today")
    assert report.num_failed == 1
    assert [report.is_done(name) for name in ("plain", "speed", "bf16", "fp16")] == [True, True, False, False]
    lines = text_of(report).splitlines()
    assert lines[1] == "GPUs: A GPU (80.0 GiB, 9.0)"
    assert "failed          same bits: bf16: alone          1.0 s  first line" in lines
    assert "below the goal  speed: plain                    0.0 s  0.9 of <it>" in lines
    assert lines[-1] == "1 passed, 1 failed, 0 skipped, 1 below the goal; of 2 states of the code"
    page = html_of(report)
    assert '<td class="v below">below the goal</td><td>speed: plain</td>' in page
    assert "<pre>&lt;/pre&gt;&lt;script&gt;</pre>" in page
    write(report, tmp_path)
    assert read(tmp_path) == report
