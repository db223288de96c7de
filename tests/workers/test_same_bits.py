"""The promise: the same bits on any number of workers, through every exchange, in everything that a training leaves.

By default every two of recipe, number of micro-batches and number of workers meet; UNISONO_TEST_ALL=1 takes all.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import unisono
from tests.parts import ALL
from tests.waiting import WAIT_S
from tests.workers import models
from tests.workers.journals import canonical
from tests.workers.models import RECIPES, Outcome
from tests.workers.processes import Seat
from tests.workers.scripts import run_script
from tests.workers.static_team import Place, train_on, trained_alone
from unisono.record.journal import compare

SEED = 3
MICROBATCHES = (4, 6, 8)
JOBS = [(name, microbatches) for microbatches in MICROBATCHES for name in RECIPES]
UNEVEN = [(name, 6) for name in RECIPES]
TEAMS = {
    "shared": (1, 2, 3, 4, 5, 8),
    "gloo": (2, 3),
    "two-level": (3, 4),
}
Jobs = list[tuple[str, int]]
Outcomes = dict[tuple[str, int], Outcome]


def jobs_of(kind: str, size: int) -> Jobs:
    """All recipes; on each number of workers every recipe with another M (or with each, if asked)."""
    if kind != "shared":
        return UNEVEN
    if ALL:
        return JOBS
    place, number = TEAMS[kind].index(size), len(MICROBATCHES)
    return [(name, MICROBATCHES[(index + place) % number]) for index, name in enumerate(RECIPES)]


def test_in_the_part_that_is_run_every_two_values_meet() -> None:
    chosen = {(*job, size) for size in TEAMS["shared"] for job in jobs_of("shared", size)}
    for one, other in itertools.combinations(range(3), 2):
        met = {(each[one], each[other]) for each in chosen}
        assert met == {(each[one], each[other]) for each in ((*job, size) for job in JOBS for size in TEAMS["shared"])}


def place_of(folder: Path, name: str, microbatches: int) -> Path:
    return folder / f"{name} {microbatches}"


def train_in(folder: Path, job: tuple[str, int], make_run: Callable[..., unisono.Run]) -> Outcome:
    with make_run(place_of(folder, *job), seed=SEED) as run:
        return RECIPES[job[0]].train(run, job[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    """Every recipe as one process trains it, and where its journals are."""
    return trained_alone(JOBS, train_in, tmp_path_factory)


def _train_all(seat: Seat, place: Place, jobs: Jobs, folder: Path) -> Outcomes:
    return {job: train_in(folder, job, place.run) for job in jobs}


@pytest.mark.filterwarnings("ignore:.* workers share .* micro-batches")
@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind, sizes in TEAMS.items() for size in sizes])
def test_a_team_gives_the_bits_of_one_worker(
    kind: str, size: int, alone: tuple[Path, Outcomes], tmp_path: Path
) -> None:
    """Digests of all steps, losses, evaluation, and the final state of all that is tracked, on every member."""
    folder, expected = alone
    jobs = jobs_of(kind, size)
    by_rank = train_on(kind, size, _train_all, jobs, tmp_path)
    for rank, outcomes in enumerate(by_rank):
        for job in jobs:
            assert outcomes[job] == expected[job], f"{job} on rank {rank}"
    for job in jobs:
        assert compare(place_of(folder, *job), place_of(tmp_path, *job)).startswith("identical: ")
        assert canonical(place_of(folder, *job)) == canonical(place_of(tmp_path, *job))


def test_the_recipes_are_trainings(alone: tuple[Path, Outcomes]) -> None:
    """What is compared would differ if anything did: M changes the bits of every recipe, and so does the recipe."""
    _, outcomes = alone
    for name in RECIPES:
        assert len({outcomes[name, microbatches].final["model"] for microbatches in MICROBATCHES}) == 3, name
    # A scale that is a power of two changes no bit, nor does computing activations again.
    twins = {"scaler": "mlp", "checkpointed": "cnn"}
    ends = {name: outcomes[name, 6].losses for name in RECIPES}
    assert len(set(ends.values())) == len(ends) - len(twins)
    for name, twin in twins.items():
        assert outcomes[name, 6].final["model"] == outcomes[twin, 6].final["model"]


# -- the real command --------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe as a script of its own: ``script.py RECIPE M DIRECTORY``."""
    path = tmp_path / "script.py"
    path.write_text("from tests.workers.models import main\n\nmain()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    return path


def call(*arguments: object) -> None:
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("name", ["cnn", "transformer", "two phases"])
def test_the_command_gives_the_bits_of_the_script_alone(name: str, script: Path, tmp_path: Path) -> None:
    """``python script.py`` against ``unisono run script.py``: processes of their own, a head, and every exchange."""
    if name == "cnn":
        call(sys.executable, script, name, 6, tmp_path / "alone")
    else:  # that a fork of this process gives the same bits as an interpreter is seen with one recipe
        assert run_script(script, name, "6", tmp_path / "alone") == (0, "")
    teams = {
        "cnn": [("--workers", 2), ("--workers", 3, "--exchange", "gloo")],
        "transformer": [("--workers", 3), ("--workers", 3, "--exchange", "two-level", "--set", "simulate-hosts=2")],
        "two phases": [("--workers", 2, "--exchange", "gloo", "--set", "simulate-hosts=2")],
    }
    for number, options in enumerate(teams[name]):
        directory = tmp_path / f"team-{number}"
        command = [sys.executable, "-P", "-m", "unisono", "run", script, *options, "--run-dir", directory]
        call(*command, "--", name, 6, tmp_path / "alone")
        assert compare(tmp_path / "alone", directory).startswith("identical: ")


@pytest.mark.usefixtures("nursery")
def test_a_launched_function_gives_the_bits_of_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[Path, Outcomes]
) -> None:
    """`unisono.launch`, as a notebook calls it; what rank 0 returns comes back."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    folder, expected = alone
    outcome = unisono.launch(functools.partial(models.train_in, tmp_path / "run", "rare", 8), workers=2)
    assert outcome == expected["rare", 8]
    assert compare(place_of(folder, "rare", 8), tmp_path / "run").startswith("identical: ")
