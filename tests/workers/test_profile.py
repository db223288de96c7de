"""A profile of some steps: one trace of all workers on one clock, which changes no bit and outlives a lost worker."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.waiting import WAIT_S
from unisono.core.errors import UsageError
from unisono.record.journal import compare
from unisono.script import profiling
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")
STEPS = ["--steps", "9"]


class Trace:
    """A trace that was read back."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            self.all: dict[str, Any] = json.load(file)
        events = self.all["traceEvents"]
        self.names = {
            event["pid"]: event["args"]["name"].partition(" on ")[0]
            for event in events
            if event["name"] == "process_name" and " on " in event["args"]["name"]
        }
        self.spans = [event for event in events if event["ph"] == "X" and event["pid"] in self.names]

    def steps(self) -> dict[str, dict[int, tuple[float, float]]]:
        """By worker and step, when it began and ended, in microseconds."""
        found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in self.names.values()}
        for event in self.spans:
            if event["name"].startswith("step "):
                number = int(event["name"].removeprefix("step "))
                found[self.names[event["pid"]]][number] = event["ts"], event["ts"] + event["dur"]
        return found

    def combined(self, worker: str, step: int) -> float:
        """When the exchange of a step ended on a worker."""
        began, ended = self.steps()[worker][step]
        return max(
            event["ts"] + event["dur"]
            for event in self.spans
            if self.names[event["pid"]] == worker and event["name"] == "exchange" and began <= event["ts"] <= ended
        )


@pytest.fixture
def calm(nursery: None, tmp_path: Path) -> Path:
    outcome = run_workers(SCRIPT, 1, directory=tmp_path / "calm", arguments=STEPS, timeout_s=WAIT_S)
    assert outcome.exit_code == 0, outcome.output
    return tmp_path / "calm"


@pytest.mark.usefixtures("nursery")
def test_all_workers_are_in_one_trace_on_one_clock_with_the_same_bits(calm: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = run_workers(SCRIPT, 3, directory=run_dir, arguments=STEPS, options=["--profile", "3:6"], timeout_s=WAIT_S)
    assert outcome.exit_code == 0, outcome.output
    assert compare(calm, run_dir).startswith("identical: 9 steps")
    assert [path.name for path in (run_dir / "profile").iterdir()] == ["steps-3-6.json.gz"]
    assert "the trace of w0, w1, w2 is" in outcome.output
    trace = Trace(run_dir / "profile" / "steps-3-6.json.gz")
    steps = trace.steps()
    assert sorted(steps) == ["w0", "w1", "w2"]
    for number in (3, 4, 5):
        began = [steps[worker][number][0] for worker in steps]
        ended = [steps[worker][number][1] for worker in steps]
        assert max(began) < min(ended), "a step is done by all at the same time"
        if number > 3:
            # Nobody ends the exchange of a step before everybody has begun it, nor begins the next one before that.
            combined = [trace.combined(worker, number) for worker in steps]
            before = [trace.combined(worker, number - 1) for worker in steps]
            assert max(before) < min(combined)
            assert max(began) < min(combined)
    assert [sorted(steps[worker]) for worker in steps] == [[3, 4, 5]] * 3
    assert any("aten::" in event["name"] for event in trace.spans)
    assert [each["worker_id"] for each in trace.all["unisono"]["workers"]] == ["w0", "w1", "w2"]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("worker", "step"), [("w1", 4), ("w0", 5)], ids=["while it records", "at the last step"])
def test_the_traces_of_the_others_are_written_when_a_worker_is_lost(
    worker: str, step: int, calm: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    outcome = run_workers(
        SCRIPT, 3, directory=run_dir, arguments=STEPS, options=["--profile", "3:6", "--max-restarts", "0"],
        faults=Faults().kill(worker, at="after_step", step=step), timeout_s=WAIT_S,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert compare(calm, run_dir).startswith("identical: 9 steps")
    (path,) = (run_dir / "profile").glob("*.json.gz")
    found = Trace(path).steps()
    assert set(found) == {"w0", "w1", "w2"} - {worker}
    assert all(sorted(each) == [3, 4, 5] for each in found.values())


CLOCKS_APART = """
import runpy, sys
from unisono.cluster.worker import member
from unisono.script import profiling

profiling.machine_name = lambda: member.spec().worker_id
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.usefixtures("nursery")
def test_the_difference_of_clocks_is_measured_between_machines(tmp_path: Path) -> None:
    """Here all have one clock, and are told that they have not: what is measured is nothing, within its bounds."""
    script = tmp_path / "apart.py"
    script.write_text(CLOCKS_APART)
    outcome = run_workers(
        script, 3, directory=tmp_path / "run", arguments=[str(SCRIPT), *STEPS],
        options=["--profile", "3:6", "--set", "simulate-hosts=3"], timeout_s=WAIT_S,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    first, *others = Trace(tmp_path / "run" / "profile" / "steps-3-6.json.gz").all["unisono"]["workers"]
    assert (first["ahead_s"], first["error_s"]) == (0.0, 0.0)
    assert len(others) == 2
    for each in others:
        assert each["error_s"] > 0.0
        assert abs(each["ahead_s"]) <= each["error_s"]


def train(directory: Path, profile: range | None, steps: int) -> None:
    with unisono.Run(directory, seed=1, profile=profile) as run:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        data = torch.utils.data.TensorDataset(torch.ones(64, 4))
        for step in run.steps(data, batch_size=8, microbatches=2, epochs=9, max_steps=steps):
            for (inputs,) in step:
                step.backward(model(inputs).square().mean())
            optimizer.step()


def test_a_script_that_runs_alone_profiles_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", range(1, 3), 4)
    assert list(Trace(tmp_path / "run" / "profile" / "steps-1-3.json.gz").steps()["w0"]) == [1, 2]
    assert capfd.readouterr().err.startswith("unisono: the trace of w0 is "), "torch's profiler says nothing itself"


def test_a_run_that_ends_within_the_steps_has_a_shorter_profile(tmp_path: Path) -> None:
    train(tmp_path / "run", range(2, 9), 4)
    assert list(Trace(tmp_path / "run" / "profile" / "steps-2-4.json.gz").steps()["w0"]) == [2, 3]


def test_a_run_that_ends_before_the_steps_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", range(20, 30), 4)
    assert not (tmp_path / "run" / "profile").exists()
    assert "ended after 4 steps, so there is no profile of the steps 20 to 29" in capfd.readouterr().err


def test_a_trace_travels_from_a_worker_that_does_not_see_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It travels with the other members' messages; the one that writes puts it where it belongs."""
    export = profiling.Profiling._export
    monkeypatch.setattr(profiling.Profiling, "_export", lambda self, path: export(self, None))
    train(tmp_path / "run", range(1, 3), 4)
    assert list(Trace(tmp_path / "run" / "profile" / "steps-1-3.json.gz").steps()["w0"]) == [1, 2]


def test_a_trace_that_is_too_large_to_travel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    export = profiling.Profiling._export
    monkeypatch.setattr(profiling.Profiling, "_export", lambda self, path: export(self, None))
    monkeypatch.setattr(profiling, "MOST_BYTES", 10)
    train(tmp_path / "run", range(1, 3), 4)
    assert "the profile of worker w0 on" in capfd.readouterr().err


@pytest.mark.parametrize("steps", [range(3, 3), range(5, 2), range(-2, 2), range(1, 9, 2)])
def test_steps_that_make_no_sense_are_refused(steps: range, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="steps to profile are A:B"):
        train(tmp_path / "run", steps, 4)


def test_a_profile_without_a_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="a profile needs the directory of the run"):
        unisono.Run(profile=range(2, 4))
