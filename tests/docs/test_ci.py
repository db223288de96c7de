"""The part about CI of docs/check.md: its jobs are YAML, and their commands do in a project what the page says."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import Block, blocks
from tests.house.rooms import ROOT
from tests.waiting import WAIT_S
from tests.workers.conftest import run_nursery, served_by

needs_yaml = pytest.mark.skipif(
    find_spec("yaml") is None, reason="PyYAML is not installed; `make test-more` installs it"
)
pytestmark = [pytest.mark.more, needs_yaml]

TRAIN = """\
import torch
from torch import nn
from torch.nn import functional as F

import unisono

with unisono.Run(seed=1) as run:
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=16, microbatches=4, epochs=1):
        for inputs, labels in step:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
        optimizer.step()
"""
BROKEN = "loss = F.cross_entropy(model(inputs), labels) * (1 + run.rank)"
PYTHON = """\
#!/bin/sh
if [ "$2" = pip ]; then echo "$@" >> "$(dirname "$0")/pip"; exit 0; fi
exec {python} "$@"
"""
"""Installs nothing: what the project needs is there."""

PAGE = blocks(ROOT / "docs" / "check.md")


def loaded(block: Block) -> Any:
    import yaml

    return yaml.safe_load(block.text)


def jobs() -> dict[str, list[str]]:
    """The commands of each job of the page."""
    github, gitlab = (loaded(block) for block in PAGE if block.language == "yaml")
    (job,) = github["jobs"].values()
    assert {"name", "jobs"} <= set(github)
    assert job["runs-on"].startswith("ubuntu-")
    assert all(set(step) <= {"uses", "with", "run"} and len({"uses", "run"} & set(step)) == 1 for step in job["steps"])
    (other,) = gitlab.values()
    assert other["image"].startswith("python:")
    return {"GitHub": [step["run"] for step in job["steps"] if "run" in step], "GitLab": other["script"]}


@pytest.fixture
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Torch is imported once for all runs."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path), served_by(path):
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the page's test."""
    (test,) = [block.text for block in PAGE if "same_bits(" in block.text]
    (tmp_path / "project" / "bin").mkdir(parents=True)
    (tmp_path / "project" / "train.py").write_text(TRAIN)
    (tmp_path / "project" / "test_train.py").write_text(test)
    python = tmp_path / "project" / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    return tmp_path / "project"


def shell(folder: Path, commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the commands of a job, as the services do: each in a shell, up to the first that fails."""
    # An installation that is older than the entry point lacks it.
    known = importlib.metadata.entry_points(group="pytest11", name="unisono")
    environment = {
        **os.environ,
        "CI": "true",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTEST_ADDOPTS": f"{'' if known else '-p unisono.testing.plugin'} --basetemp {folder / 'base'}",
    }
    return subprocess.run(
        ["sh", "-e", "-c", "\n".join(commands)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip


def test_the_jobs_pass_and_name_the_line_that_breaks_the_bits(project: Path, nursery: None) -> None:
    update, add = next(
        [line.removeprefix("$ ") for line in block.text.splitlines()]
        for block in PAGE
        if "--unisono-update" in block.text
    )
    made = shell(project, [update])
    assert made.returncode == 0, made.stdout
    assert (project / add.split()[-1]).is_file()
    done = shell(project, jobs()["GitHub"])
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout

    script = project / "train.py"
    script.write_text(script.read_text().replace("loss = F.cross_entropy(model(inputs), labels)", BROKEN))
    broken = shell(project, jobs()["GitLab"])
    assert broken.returncode == 1
    assert "3 workers, one killed: DIFFERS at micro-batch 2 of step 0: " in broken.stdout
    assert f"train.py:14: {BROKEN}" in broken.stdout
    assert (project / "bin" / "pip").read_text() == "-m pip install -r requirements.txt\n" * 2
