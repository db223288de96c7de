"""A run that version 0.1 has written (three workers, one of them killed): today's version understands all of it.

Every number of that training is exact, so its bits are the same on any processor.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.data import exact_training
from tests.waiting import WAIT_S
from unisono.cli.compare import compare as compare_command
from unisono.cli.replay import replay
from unisono.cli.report import report
from unisono.cli.watch import watch
from unisono.core.errors import RecipeError, RunDirectoryError
from unisono.record.history import History
from unisono.record.journal import compare
from unisono.record.rundir import RUN_FILE

DATA = Path(exact_training.__file__).parent
STEPS = 12


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "run-0.1", tmp_path / "run-0.1"))


def train(directory: Path, steps: int, resume: str | None = None) -> None:
    policy = unisono.Checkpoints(every_steps=5, keep=2)
    with unisono.Run(directory, seed=5, device="cpu", checkpoint=policy, resume=resume) as run:
        exact_training.train(run, steps)


def test_its_bits_are_those_of_today(earlier: Path, tmp_path: Path) -> None:
    train(tmp_path / "today", STEPS)
    assert compare(earlier, tmp_path / "today").startswith(f"identical: {STEPS} steps")


def test_it_is_gone_on_with(earlier: Path, tmp_path: Path) -> None:
    """From its newest checkpoint, in its directory and in another one."""
    train(tmp_path / "today", STEPS + 4)
    train(tmp_path / "elsewhere", STEPS + 4, resume=str(earlier / "checkpoints" / "step-0000000010"))
    train(earlier, STEPS + 4, resume="auto")
    for directory in (tmp_path / "elsewhere", earlier):
        assert f"identical: {STEPS + 4} steps" in compare(tmp_path / "today", directory)
    assert len(History(earlier).facts()["earlier"]) == 1


def test_it_is_computed_again(earlier: Path) -> None:
    """On this machine, from a checkpoint before the step, with every digest as in the journal."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "unisono",
        "replay",
        earlier,
        "--step",
        "11",
        "--micro-batch",
        "1",
    ]
    command += [DATA / "exact_training.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "were computed again and compared with the journal: 2 equal" in done.stdout


@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        (watch, (), "w1"),
        (watch, ("--once",), "w1"),
        (report, (), "report written to "),
        (compare_command, (str(DATA / "run-0.1"),), "identical: 12 steps"),
    ],
)
def test_it_is_looked_at(command: click.Command, options: tuple[str, ...], told: str, earlier: Path) -> None:
    result = CliRunner().invoke(command, [str(earlier), *options], catch_exceptions=False, standalone_mode=False)
    assert told in result.output
    assert "cannot be read" not in result.output
    assert "newer version" not in result.output


def test_a_run_of_a_newer_version_is_refused_where_it_would_be_changed(earlier: Path) -> None:
    facts = json.loads((earlier / RUN_FILE).read_text())
    (earlier / RUN_FILE).write_text(json.dumps({**facts, "schema": 2}))
    wanted = r"was written by a newer version of unisono \(schema 2 of run.json, this one knows 1\); use that version"
    with pytest.raises(RunDirectoryError, match=wanted):
        train(earlier, STEPS + 4, resume="auto")
    with pytest.raises(RunDirectoryError, match=wanted):
        CliRunner().invoke(replay, [str(earlier), "--step", "3"], catch_exceptions=False, standalone_mode=False)


def train_in_rounds(directory: Path, resume: str) -> None:
    """The training of the run with late rounds, without a delay."""
    with unisono.Run(directory, seed=3, device="cpu", resume=resume) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(48, 3, generator=draw), torch.randint(0, 2, (48,), generator=draw))
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        for round_ in run.local_steps(data, batch_size=12, microbatches=4, replicas=2, inner_steps=2, epochs=3):
            for step in round_:
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()


@pytest.fixture
def late(tmp_path: Path) -> Path:
    """A run of local steps with a delay, which version 0.2.0 has written, and this version cannot make."""
    return Path(shutil.copytree(DATA / "run-0.2-late-rounds", tmp_path / "run-0.2"))


@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        (watch, ("--once",), "4 of 6 rounds"),
        (report, (), "report written to "),
        (compare_command, (str(DATA / "run-0.2-late-rounds"),), "identical: 4 steps"),
    ],
)
def test_local_steps_with_a_delay_are_looked_at(
    command: click.Command, options: tuple[str, ...], told: str, late: Path
) -> None:
    result = CliRunner().invoke(command, [str(late), *options], catch_exceptions=False, standalone_mode=False)
    assert told in result.output
    assert "cannot be read" not in result.output


def test_the_weights_of_local_steps_with_a_delay_are_read(late: Path) -> None:
    assert set(unisono.load_weights(late, nn.Linear(3, 2))) == {"weight", "bias"}


@pytest.mark.parametrize("resume", ["auto", "checkpoints/step-0000000004"])
def test_local_steps_with_a_delay_are_not_gone_on_with(resume: str, late: Path, tmp_path: Path) -> None:
    """The version that can is named, and the run is left as it is."""
    before = (late / "journal.jsonl").read_bytes()
    directory, resume = (late, resume) if resume == "auto" else (tmp_path / "elsewhere", str(late / resume))
    with pytest.raises(RecipeError, match=r"local_steps\(delay=1\).*version 0\.2\.0 can resume such a run"):
        train_in_rounds(directory, resume)
    assert (late / "journal.jsonl").read_bytes() == before
