"""The night's runner: each benchmark starts and writes its file, and one that fails does not stop the others."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import night
from benchmarks.tables import PARTS, LacksError
from tests.house.rooms import ROOT
from tests.parts import ALL

pytestmark = pytest.mark.more

PART = ("step_time", "one_worker", "quality", "history")
"""The others take longer, or more of the system: `make nightly`."""


@pytest.mark.parametrize("name", night.BENCHMARKS if ALL else PART)
def test_a_benchmark_starts_and_writes_its_file(name: str, tmp_path: Path) -> None:
    night.measure(name, "smoke", tmp_path)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert (found["status"], found["exit_code"]) == ("measured", 0), found["reason"]
    assert found["runs"]
    assert found["commit"]
    for part in PARTS.values():
        with suppress(LacksError):
            part({name: found})


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, limit_s: float = 60.0) -> dict[str, object]:
    """Measure with a script in the place of the benchmark; its last argument is the file for the result."""
    path = folder / "scripted.py"
    path.write_text(script)
    ours = night._run

    def instead(command: list[str], limit: float, scratch: Path) -> tuple[int | None, str]:
        return ours([sys.executable, str(path), *command[-2:]], limit_s, scratch)

    monkeypatch.setattr(night, "_run", instead)
    return night.measure("loading", "smoke", folder / "results")


def test_a_benchmark_that_fails_is_kept_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, "raise SystemExit('no such disk')")
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "no such disk" in str(found["reason"])
    assert (tmp_path / "results" / "loading.json").exists()


def test_a_benchmark_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, "import signal; signal.pause()", limit_s=0.5)
    assert (found["status"], found["exit_code"]) == ("late", None)


def test_a_benchmark_that_writes_nothing_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, "print('done')")
    assert (found["status"], found["exit_code"]) == ("failed", 0)


def test_what_pip_said_of_a_peer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchft.log").write_text("Collecting torchft\nERROR: No matching distribution found for torchft\n")
    monkeypatch.setattr(night, "PEERS", tmp_path)
    script = (
        "import json, sys; result = {'runs': [1], 'left_out': {'torchft local': 'torchft is not installed'}}; "
        "open(sys.argv[-1], 'w').write(json.dumps(result))"
    )
    found = run(monkeypatch, tmp_path, script)
    assert found["status"] == "measured"
    reason = "torchft is not installed; pip: ERROR: No matching distribution found for torchft"
    assert found["left_out"] == {"torchft local": reason}


@pytest.mark.parametrize("name", night.BENCHMARKS)
def test_the_words_of_a_benchmark_are_options_of_its_module(name: str) -> None:
    source = (ROOT / "benchmarks" / f"{night.BENCHMARKS[name].module}.py").read_text()
    for size in ("full", "quick", "smoke"):
        words = night.arguments_of(night.BENCHMARKS[name], size)
        assert [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source] == []
