"""Checkpoints of a run whose optimizer states are shared out, when workers are lost while they are written.

By default a sample; UNISONO_TEST_ALL runs every point x worker, and more kills of whole runs.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import forked, marked, served_by, wait_until_gone
from tests.workers.losses import ended_workers
from tests.workers.test_checkpoint import CHECKPOINT_POINTS, SCRIPT, STEP_POINTS, check_readable, steps
from unisono.testing import Faults, Outcome, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

ALONE = [*PATIENT, "--max-restarts", "0"]
LAST_STEP = 12
SAMPLE = [("checkpoint_part_written", "w0"), ("checkpoint_before_manifest", "w0"), ("shard.in_lending", "w1")]
SIGHT_POINTS = ["checkpoint_part_written", "checkpoint_before_manifest"]
POINTS_AT_END = [*SAMPLE, *((at, "w0") for at in CHECKPOINT_POINTS), ("shard.in_lending", "w0")] if ALL else SAMPLE


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """With a replicated optimizer, and never stopped."""
    with served_by(standing_nursery):
        return run_workers(SCRIPT, 2, directory=tmp_path_factory.mktemp("calm") / "run", arguments=["--every", "0"])


def is_same(hurt: Outcome, calm: Outcome) -> bool:
    return (hurt.digests, hurt.final, hurt.evaluations) == (calm.digests, calm.final, calm.evaluations)


@pytest.mark.parametrize(("at", "worker"), POINTS_AT_END)
def test_the_last_checkpoint_is_whole_whoever_is_lost_while_it_is_made(
    at: str, worker: str, calm: Outcome, tmp_path: Path
) -> None:
    """Its writer, or one that lends to it: the others make it again, unless it is there."""
    directory = tmp_path / "run"
    faults = Faults().kill(worker, at=at)
    hurt = run_workers(
        SCRIPT, 3, directory=directory, faults=faults, options=ALONE, arguments=["--every", "0", "--copies", "2"]
    )
    assert hurt.exit_code == 0, hurt.output
    assert worker in ended_workers(hurt.output), hurt.output
    assert is_same(hurt, calm), hurt.output
    check_readable(directory)
    assert steps(directory) == [LAST_STEP]


@pytest.mark.parametrize("number", range(8) if ALL else range(1))
def test_killing_the_whole_run_again_and_again_changes_no_bit(
    number: int, calm: Outcome, tmp_path: Path, mark: str
) -> None:
    """It goes on with other numbers of workers and copies, and with a replicated optimizer in between."""
    draw = random.Random(number)
    directory = tmp_path / "run"
    workers, copies = 3, 2
    for kill in range(3):
        at = draw.choice(CHECKPOINT_POINTS if kill % 2 == 0 else STEP_POINTS)
        step = -1 if at.startswith("checkpoint") else draw.randrange(4, 12)
        options = ["--resume", str(directory)] if kill else []
        faults = Faults().kill_run("w0", at=at, step=step)
        outcome = run_workers(
            SCRIPT, workers, directory=directory, options=options, faults=faults, arguments=["--copies", str(copies)]
        )
        assert outcome.exit_code in (0, -signal.SIGKILL), outcome.output
        wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)  # who still ends holds the directory
        check_readable(directory)
        workers, copies = draw.choice([1, 2, 3, 4]), draw.choice([0, 1, 2])
    end = run_workers(SCRIPT, 3, directory=directory, options=["--resume", str(directory)], arguments=["--copies", "2"])
    assert end.exit_code == 0, end.output
    assert is_same(end, calm), end.output
    check_readable(directory)
    assert steps(directory)[-1] == LAST_STEP


@pytest.mark.parametrize("worker", ["w0", "w1"] if ALL else ["w1"])
def test_losing_a_worker_while_a_checkpoint_is_loaded_loses_no_state(
    worker: str, calm: Outcome, tmp_path: Path
) -> None:
    """With one copy of each state, and before anything is trained: the others read the states again."""
    directory = tmp_path / "run"
    arguments = ["--every", "2", "--copies", "1"]
    stopped = Faults().kill_run("w0", at="checkpoint_renamed")
    begun = run_workers(SCRIPT, 3, directory=directory, faults=stopped, arguments=arguments)
    assert begun.exit_code == -signal.SIGKILL, begun.output
    resume = [*ALONE, "--resume", str(directory)]
    faults = Faults().kill(worker, at="shard.loading")
    hurt = run_workers(SCRIPT, 3, directory=directory, faults=faults, options=resume, arguments=arguments)
    assert hurt.exit_code == 0, hurt.output
    assert worker in ended_workers(hurt.output), hurt.output
    assert is_same(hurt, calm), hurt.output


@pytest.mark.parametrize("at", CHECKPOINT_POINTS if ALL else ["checkpoint_part_written"])
@pytest.mark.parametrize("worker", ["w0", "w1", "w2"] if ALL else ["w1"])
def test_losing_a_worker_in_a_checkpoint_changes_no_bit(at: str, worker: str, calm: Outcome, tmp_path: Path) -> None:
    """The attempt that it was part of is dropped, and made again without it."""
    directory = tmp_path / "run"
    arguments = ["--every", "2", "--copies", "2"]
    hurt = run_workers(
        SCRIPT, 3, directory=directory, faults=Faults().kill(worker, at=at), options=ALONE, arguments=arguments
    )
    assert hurt.exit_code == 0, hurt.output
    assert is_same(hurt, calm), hurt.output
    check_readable(directory)
    assert LAST_STEP in steps(directory)


@pytest.mark.parametrize("at", CHECKPOINT_POINTS if ALL else SIGHT_POINTS)
def test_losing_the_only_worker_that_sees_the_directory_costs_the_last_checkpoint_only(
    at: str, calm: Outcome, tmp_path: Path
) -> None:
    """The others end the run, and say that nobody is left who could write."""
    faults = Faults().kill("w0", at=at)
    arguments = ["--every", "0", "--copies", "2", "--blind", "w1", "w2"]
    hurt = run_workers(SCRIPT, 3, directory=tmp_path / "run", faults=faults, options=ALONE, arguments=arguments)
    assert hurt.exit_code == 0, hurt.output
    assert "w0" in ended_workers(hurt.output), hurt.output
    assert "did step 11" in hurt.output, hurt.output
    assert hurt.digests == calm.digests[: len(hurt.digests)], hurt.output
    assert "no remaining worker sees that directory" in hurt.output, hurt.output


LENDING = [("w0", ["--every", "0"])]
if ALL:
    LENDING = [(worker, ["--every", every]) for worker in ("w0", "w1", "w2", "w3") for every in ("0", "3")]


@pytest.mark.parametrize(("worker", "arguments"), LENDING)
def test_losing_a_worker_while_states_travel_to_one_that_sees_the_directory(
    worker: str, arguments: list[str], calm: Outcome, tmp_path: Path
) -> None:
    """The one that they travel to, or one that they come from."""
    directory = tmp_path / "run"
    arguments = [*arguments, "--copies", "2", "--blind", "w2", "w3"]
    faults = Faults().kill(worker, at="shard.in_lending")
    hurt = run_workers(SCRIPT, 4, directory=directory, faults=faults, options=ALONE, arguments=arguments)
    assert hurt.exit_code == 0, hurt.output
    assert worker in ended_workers(hurt.output), hurt.output
    assert is_same(hurt, calm), hurt.output
    check_readable(directory)
    assert steps(directory)[-1] == LAST_STEP
    again = run_workers(
        SCRIPT, 3, directory=directory, options=["--resume", str(directory)],
        arguments=["--copies", "2", "--blind", "w1", "w2"],
    )  # fmt: skip
    assert is_same(again, calm), again.output


@pytest.mark.parametrize(
    ("at", "worker"),
    [(at, worker) for at in ("reduced", "committed", "shard.delivered") for worker in ("w0", "w1", "w3")]
    if ALL
    else [("committed", "w1")],
)
def test_members_that_lag_behind_a_loss_take_part_in_what_others_have_begun(
    at: str, worker: str, calm: Outcome, tmp_path: Path
) -> None:
    """States were to travel at the boundary after the step in which the worker was lost."""
    directory = tmp_path / "run"
    arguments = ["--every", "3", "--copies", "2", "--blind", "w2", "w3"]
    faults = Faults().kill(worker, at=at, step=2)
    hurt = run_workers(SCRIPT, 4, directory=directory, faults=faults, options=ALONE, arguments=arguments)
    assert hurt.exit_code == 0, hurt.output
    assert worker in ended_workers(hurt.output), hurt.output
    assert is_same(hurt, calm), hurt.output
    check_readable(directory)
    assert steps(directory)[-1] == LAST_STEP
