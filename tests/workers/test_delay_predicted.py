"""Predicted parameters over losses, newcomers and resumes: no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.test_delay_faults import LONG, STEP, assert_same_bits, run, some
from unisono.testing import Faults, Outcome

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

PREDICT = ["--delay", "2", "--predict"]


@pytest.fixture(scope="module")
def predicted(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker to which nothing happens, with predicted parameters."""
    with served_by(standing_nursery):
        return run(tmp_path_factory.mktemp("predicted") / "run", 1, arguments=[*PREDICT, "--steps", str(LONG)])


@pytest.mark.parametrize(
    ("workers", "at"),
    some(("3:3", "after_backward"), ("3", "delay.waiting"), ("3", "delay.applied"), ("2", "committed")),
)
def test_a_kill_changes_no_predicted_parameter(workers: str, at: str, predicted: Outcome, tmp_path: Path) -> None:
    """What is computed again is computed with them; a newcomer predicts from the same update."""
    arguments = [*PREDICT, "--steps", str(LONG)]
    hurt = run(tmp_path / "run", workers, Faults().kill("w1", step=STEP, at=at), PATIENT, arguments)
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, predicted)


def test_a_run_goes_on_with_predicted_parameters(predicted: Outcome, tmp_path: Path) -> None:
    """A checkpoint holds the true parameters, and those before the newest update."""
    arguments = [*PREDICT, "--every", "2", "--steps", str(LONG)]
    killed = run(tmp_path / "run", 2, Faults().kill_run("w0", step=10, at="after_backward"), PATIENT, arguments)
    assert killed.exit_code != 0
    resumed = run(tmp_path / "run", 1, None, [*PATIENT, "--resume", "auto"], arguments)
    assert resumed.exit_code == 0, resumed.output
    assert f"unisono: 1 of {LONG} steps" not in resumed.output, "it began again"
    assert resumed.digests == predicted.digests, resumed.output
    assert resumed.final == predicted.final
