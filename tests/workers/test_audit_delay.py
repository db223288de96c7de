"""``unisono run --audit`` with ``run.steps(delay=D)``: what is under way is done again without the wrong worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENT, WAIT_S
from unisono.testing import Faults, Outcome, run_workers

SCRIPT = Path(__file__).with_name("delayed_training.py")
GO_ON = ("--audit", "0.5", "--audit-then", "go-on")
pytestmark = pytest.mark.usefixtures("nursery")


def train(directory: Path, workers: int, *options: str, arguments: tuple[str, ...] = (), **more: Any) -> Outcome:
    return run_workers(
        SCRIPT,
        workers,
        directory=directory,
        options=[*PATIENT, *options],
        arguments=["--steps", "14", *arguments],
        timeout_s=WAIT_S,
        **more,
    )


@pytest.mark.parametrize("delay", ["1", "3"])
def test_a_worker_that_computes_wrong_gradients_is_evicted(delay: str, tmp_path: Path) -> None:
    arguments = ("--delay", delay)
    calm = train(tmp_path / "calm", 1, arguments=arguments)
    faults = Faults().corrupt("w1", "gradient", step=9, lasting=True)
    found = train(tmp_path / "run", 3, *GO_ON, arguments=arguments, faults=faults)
    assert found.exit_code == 0, found.output
    assert (found.digests, found.final, found.evaluations) == (calm.digests, calm.final, calm.evaluations), found.output
    assert re.search(r"w1 on host \S+ computes wrong values on device cpu: .*micro-batch", found.output)
