"""A project outside of this one: its test has the fixture ``same_bits``, and is told the line that breaks its bits; and
`compare --bisect` names the commit, and touches nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("nursery")]

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
    seen = 0
    for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
        for inputs, labels in step:
            seen += 1
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
        optimizer.step()
"""
TEST = """\
import pytest


@pytest.mark.unisono_slow
def test_the_bits(same_bits):
    same_bits("train.py", workers=(1, 3), steps=3, golden="train")


def test_other():
    pass
"""


def run_pytest(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder, as the shell would."""
    # An installation that is older than the entry point lacks it.
    known = importlib.metadata.entry_points(group="pytest11", name="unisono")
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-rA", "--basetemp", str(folder / "base")]
    command += ["-p", "no:cacheprovider", *([] if known else ["-p", "unisono.testing.plugin"]), *words]
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    return subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "test_train.py").write_text(TEST)
    return folder


def change(file: Path, before: str, after: str) -> str:
    """Change one line of a file; returns its place and text, as messages have it."""
    (number, line), *others = [
        (number, line) for number, line in enumerate(file.read_text().splitlines(), 1) if before in line
    ]
    assert not others
    file.write_text(file.read_text().replace(before, after))
    return f"line {number} is `{line.replace(before, after).strip()}`"


def test_a_project_is_told_the_line_that_breaks_its_bits(project: Path) -> None:
    """A line that has changed since the golden bits, and one that breaks the promise."""
    assert run_pytest(project, "-m", "not unisono_slow").stdout.count("1 passed, 1 deselected") == 1
    assert run_pytest(project, "--unisono-update", "-m", "unisono_slow").returncode == 0
    golden = json.loads((project / "test_train.train.bits.json").read_text())
    assert [len(one["digests"]) for one in golden] == [3]

    line = change(project / "train.py", "lr=0.1", "lr=0.2")
    failed = run_pytest(project, "-m", "unisono_slow").stdout
    assert "train.py has different bits from the golden ones in test_train.train.bits.json" in failed
    assert "step 1 is the first that differs" in failed
    assert "optimizer['param_groups'][0]['lr'] is 0.1 and 0.2 (golden, and now)" in failed
    assert "micro-batch 0 of step 1: " in failed
    assert "the first gradient that differs is that of 'model.weight'" in failed
    assert f"1 place differs: {line} in train.py" in failed

    change(project / "train.py", "model(inputs), labels)", "model(inputs), labels) * (1 + 0.01 * seen)")
    failed = run_pytest(project, "-m", "unisono_slow").stdout
    assert "3 workers, one killed: DIFFERS at micro-batch 2 of step 0: its loss is" in failed
    assert "train.py:15: seen += 1" in failed
    assert "2 alone, and" in failed


CASES = """\
import json
import os
from pathlib import Path

import pytest

from unisono.testing import Faults


def train(rate, breaks=False):
    import torch

    import unisono

    assert os.environ["ABOUT"] == "bits"
    with unisono.Run(seed=1) as run:
        data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
        model = torch.nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=4):
            for inputs, wanted in step:
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                factor = 1 + run.rank if breaks else 1
                (loss * factor).backward()
            optimizer.step()


ABOUT = {"ABOUT": "bits"}


def test_a_function(same_bits):
    same_bits(train, arguments=[0.1], steps=2, environment=ABOUT, golden="function")


def test_a_function_that_breaks(same_bits):
    same_bits(train, arguments=[0.1, True], steps=2, environment=ABOUT)


def test_other_arithmetic(same_bits, monkeypatch):
    monkeypatch.setenv("CI", os.environ["AS_IN_CI"])
    (file,) = Path(__file__).parent.glob("*.function.bits.json")
    found = json.loads(file.read_text())
    found[0]["arithmetic"]["instructions"] = "OTHER"
    file.with_name(file.name.replace("function", "other")).write_text(json.dumps(found))
    same_bits(train, arguments=[0.1], workers=(1,), steps=2, environment=ABOUT, golden="other")


def test_a_fault_that_does_not_come(same_bits):
    faults = Faults().kill("w1", step=9, at="after_backward")
    same_bits("train.py", workers=(1, 2), steps=2, kill=faults)


def test_no_golden_bits(same_bits):
    same_bits("train.py", workers=(1,), steps=2, golden="none")


def test_nothing_to_compare(same_bits):
    same_bits("train.py", workers=(1,))


def test_no_script(same_bits):
    same_bits("gone.py")


def test_one_step(same_bits):
    same_bits("train.py", steps=1)


def test_wrong_arguments(same_bits):
    same_bits(train, arguments=[1, 2, 3])
"""


def test_functions_faults_and_what_is_refused(project: Path) -> None:
    (project / "test_train.py").write_text(CASES)
    made = run_pytest(project, "--unisono-update", "-k", "test_a_function and not breaks", AS_IN_CI="")
    assert made.returncode == 0, made.stdout
    found = run_pytest(project, AS_IN_CI="").stdout
    said = dict(
        line.removeprefix("FAILED test_train.py::").split(" - ", 1) for line in found.splitlines() if " - " in line
    )
    assert "PASSED test_train.py::test_a_function\n" in found
    assert "factor = 1 + run.rank if breaks else 1\n" in found
    assert "SKIPPED [1]" in found
    assert (
        "test_train.other.bits.json has no golden bits for the arithmetic of this machine (instructions: OTHER" in found
    )
    assert set(said) == {
        *("test_a_function_that_breaks", "test_a_fault_that_does_not_come", "test_no_golden_bits", "test_no_script"),
        *("test_nothing_to_compare", "test_one_step", "test_wrong_arguments"),
    }
    for words in (
        "no worker was lost in the run with 2 workers, with faults, so nothing was shown",
        "test_train.none.bits.json: write it with pytest --unisono-update, look at it, and commit it",
        "steps=20 and workers=(1,) compare nothing",
        "there is no script gone.py (looked in ",
        "steps=1 and workers=(1, 3) compare nothing",
        "train() cannot be called by workers: TypeError: too many positional arguments",
    ):
        assert words in found
    strict = run_pytest(project, "-k", "test_other_arithmetic", AS_IN_CI="true")
    assert strict.returncode == 1
    assert "FAILED test_train.py::test_other_arithmetic" in strict.stdout


# -- the commit ------------------------------------------------------------------------------------------


def git(folder: Path, *words: str, check: bool = True) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own["GIT_OPTIONAL_LOCKS"] = "0"  # to look at the state of an index does not write it
    names = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    command = ["git", *names, *words]
    return subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, timeout=WAIT_S, check=check
    ).stdout  # fmt: skip


def commit(folder: Path, subject: str, **files: str) -> None:
    for name, text in files.items():
        path = folder / "jobs" / f"{name}.py" if name == "train" else folder / "src" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(folder, "add", "jobs/train.py", "src")
    git(folder, "commit", "--quiet", "--message", subject)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a script, a package that it finds by ``PYTHONPATH``, and data that git does not have."""
    folder = tmp_path
    git(folder, "init", "--quiet")
    train = TRAIN.replace("import unisono\n", "import unisono\nfrom rates import RATE\n").replace("lr=0.1", "lr=RATE")
    train += "open('data.txt').read()\n"
    train = train.replace("import torch\n", "import torch\n\nopen('data.txt').read()\n", 1)
    commit(folder, "Train", train=train, rates="RATE = 0.1\n")
    git(folder, "tag", "good")
    commit(folder, "Say more", train=f"{train}# more\n")
    commit(folder, "Break it", rates="raise SystemExit(3)\n")
    commit(folder, "Repair it", rates="RATE = 0.1\n")
    commit(folder, "Take a larger rate", rates="RATE = 0.2\n")
    commit(folder, "Say less", train=train)
    (folder / "jobs" / "data.txt").write_text("some\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "src"), os.environ.get("PYTHONPATH", "")]))
    return folder


def state(folder: Path) -> dict[str, str]:
    """What a user has of a checkout: files, index, HEAD, references, a bisect of their own, worktrees."""
    asked = ("status --porcelain", "for-each-ref", "symbolic-ref HEAD", "bisect log", "worktree list", "stash list")
    files = {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (*folder.glob("src/*.py"), *folder.glob("jobs/*"), *folder.glob(".git/*"))
        if path.is_file() and path.name != "packed-refs"  # which has the same references, in other words
    }
    return {**files, **{words: git(folder, *words.split(), check=False) for words in asked}}


def test_the_commit_is_named_and_nothing_of_the_checkout_is_touched(repository: Path, unisono: Unisono) -> None:
    """From a folder below, with changes that are not committed, within a bisect of the user's own."""
    folder = repository / "jobs"
    (repository / "src" / "rates.py").write_text("RATE = 0.3\n")
    git(repository, "bisect", "start")
    before = state(repository)
    command = [sys.executable, "-P", "-m", "unisono", "compare", "--bisect", "good", "main", "train.py", "--steps", "3"]
    refused = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert refused.returncode == 2
    assert "data.txt" in refused.stderr
    assert "--link PATH adds a file or folder of this one" in refused.stderr

    command += ["--link", "data.txt"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done.stderr
    first, *why = done.stdout.splitlines()
    assert first.startswith("different: since commit ")
    assert first.endswith(" Take a larger rate")
    assert any("step 1 is the first to differ: digest is " in line and " in good, " in line for line in why), why
    assert any("micro-batch 0 of step 1: " in line and "'model.weight'" in line for line in why), why
    assert why[-1] == (
        "    1 place differs: line 1 is `RATE = 0.2` in src/rates.py, and line 1 is `RATE = 0.1` in src/rates.py before"
    )
    assert state(repository) == before

    same = subprocess.run(
        [*command[:6], "good", "good~0", *command[8:]], cwd=folder, capture_output=True, text=True, timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    assert (same.returncode, same.stdout) == (0, "identical: the first 3 steps have the same bits at both commits\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_bisect_that_is_ended_leaves_nothing(
    number: signal.Signals, code: int, repository: Path, unisono: Unisono
) -> None:
    script = repository / "jobs" / "train.py"
    os.mkfifo(repository / "never")
    script.write_text("open('never').read()\n")
    git(repository, "commit", "--all", "--quiet", "--message", "Wait")
    before = state(repository)
    command = unisono("compare", "--bisect", "main", "good", "jobs/train.py", "--link", "never")
    writer = os.open(repository / "never", os.O_WRONLY)  # returns when the script has opened it
    command.process.send_signal(number)
    assert command.wait() == code
    os.close(writer)
    assert state(repository) == before


def test_commits_that_cannot_run_hide_the_one(repository: Path) -> None:
    for subject, rates in (("Break it again", "import gone\n"), ("Take the largest", "RATE = 0.4\n")):
        commit(repository, subject, rates=rates)
    command = [sys.executable, "-P", "-m", "unisono", "compare", "--bisect", "main~2", "main", "train.py"]
    command += ["--steps", "2", "--link", "data.txt"]
    done = subprocess.run(
        command, cwd=repository / "jobs", capture_output=True, text=True, timeout=WAIT_S, check=False
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    first, *parted = done.stdout.splitlines()
    assert first.startswith("different: since one of these commits, of which some cannot run: ")
    assert "Break it again" in first
    assert "Take the largest" in first
    assert any("step 1 is the first to differ" in line for line in parted)
    assert "gone" in done.stderr
    assert "and is skipped" in done.stderr
