"""Each strategy on an emulated accelerator, on two workers of which one is killed: the bits of the CPU alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from tests.workers.losses import ended_workers
from tests.workers.trainings import Training
from unisono.testing import Faults, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("on_device.py")


@pytest.mark.parametrize(
    ("name", "alone", "arguments", "at"),
    [
        pytest.param("small_training", (), (), "after_backward", id="each step together"),
        pytest.param("delayed_training", (), (), "delay.waiting", id="sums under way"),
        pytest.param("local_training", (), (), "before_combine", id="local steps"),
        pytest.param(
            "sharded_training", ("--copies", "0"), ("--copies", "2"), "after_backward", id="a sharded optimizer"
        ),
    ],
)
def test_a_kill_changes_no_bit(
    name: str, alone: tuple[str, ...], arguments: tuple[str, ...], at: str, tmp_path: Path
) -> None:
    calm = Training(f"{name}.py")(tmp_path / "calm", 1, arguments=alone)
    assert calm.exit_code == 0, calm.output
    hurt = run_workers(
        SCRIPT,
        2,
        directory=tmp_path / "run",
        options=PATIENT,
        arguments=[name, *arguments],
        faults=Faults().kill("w1", step=3, at=at),
        timeout_s=WAIT_S,
    )
    assert hurt.exit_code == 0, hurt.output
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert hurt.digests == calm.digests, hurt.output
    assert hurt.final == calm.final, hurt.output
