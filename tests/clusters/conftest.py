"""What tests with batch systems share with those with real processes, and the runs that they compare theirs with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.conftest import mark, nursery, script, served_by, standing_nursery, unisono
from tests.workers.trainings import Training

__all__ = ["CHECKPOINTED", "LONG", "SMALL", "STEPS", "mark", "nursery", "script", "standing_nursery", "unisono"]

SMALL = Training("small_training.py").path
CHECKPOINTED = Training("checkpointed_training.py").path
STEPS, LONG = 8, 24


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker."""
    return _calm(standing_nursery, tmp_path_factory, Training("small_training.py", "--steps", STEPS))


@pytest.fixture(scope="module")
def calm_checkpointed(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a longer run of one worker, which writes no checkpoint before its end."""
    return _calm(
        standing_nursery, tmp_path_factory, Training("checkpointed_training.py", "--steps", LONG, "--every", 0)
    )


def _calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory, train: Training) -> Path:
    folder = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        done = train(folder, 1)
    assert done.exit_code == 0, done.output
    return folder
