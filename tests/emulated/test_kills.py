"""Each strategy on an emulated accelerator, on workers of which one is killed: the bits of the CPU alone.

UNISONO_TEST_ALL=1 kills at every point of each strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT, WAIT_S
from tests.workers.losses import ended_workers
from tests.workers.trainings import Training
from unisono.system.faults import POINTS
from unisono.testing import Faults, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("on_device.py")
STEP = ("before_backward", "after_backward", "before_combine", "published", "reduced", "committed", "after_step")
"""Points that every strategy passes."""
NOT_PASSED = ("local.coded", "local.grouped", "local.ungrouped", "delay.again", "shard.loading", "shard.in_lending")
"""Points of special cases."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    script: str
    at: str
    """Where a worker is killed in any case."""
    alone: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """On several workers, which have equal shares: a worker that is to be killed in a micro-batch has one."""
    workers: int | str = 2
    options: tuple[str, ...] = ()
    points: str = ""
    """How the names of its own points begin."""

    def places(self) -> tuple[str, ...]:
        own = [at for at in POINTS if self.points and at.startswith(self.points) and at not in NOT_PASSED]
        return (self.at, *(at for at in (*STEP, *own) if ALL and at != self.at))


STRATEGIES = {
    "each step together": Strategy(script="small_training", at="after_backward", arguments=("--even",)),
    "sums under way": Strategy(script="delayed_training", at="delay.waiting", arguments=("--even",), points="delay."),
    "local steps": Strategy(script="local_training", at="before_combine", arguments=("--even",), points="local."),
    "local steps of groups": Strategy(
        script="local_training",
        at="local.inner_step",
        alone=("--replicas", "2"),
        arguments=("--replicas", "2", "--even"),
        workers=4,
    ),
    "a sharded optimizer": Strategy(
        script="sharded_training",
        at="after_backward",
        alone=("--copies", "0"),
        arguments=("--copies", "2", "--unbalanced"),
        points="shard.",
    ),
    "groups": Strategy(
        script="staged_training",
        at="stages.exchange",
        alone=("--stages", "1", "--shards", "2"),
        arguments=("--stages", "1", "--shards", "2", "--unbalanced"),
        workers="2x2",
        points="lanes.",
    ),
    "audits": Strategy(
        script="small_training", at="committed", arguments=("--even",), workers=3, options=("--audit", "0.5")
    ),
    "evaluators": Strategy(
        script="evaluated_training", at="evaluation.written", options=("--evaluators", "1"), points="evaluation."
    ),
}


@pytest.mark.parametrize(
    "has_float64", [True, False] if ALL else [True], ids=lambda has: "" if has else "without float64"
)
@pytest.mark.parametrize(
    ("name", "at"),
    [pytest.param(name, at, id=f"{name}, {at}") for name, one in STRATEGIES.items() for at in one.places()],
)
def test_a_kill_changes_no_bit(
    name: str, at: str, has_float64: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_float64:
        monkeypatch.setenv("EMULATED_WITHOUT_FLOAT64", "1")
    one = STRATEGIES[name]
    calm = Training(f"{one.script}.py")(tmp_path / "calm", 1, arguments=one.alone)
    assert calm.exit_code == 0, calm.output
    beside = at.startswith("evaluation.")  # by the first worker, and not in every step
    fault = Faults().kill("w0", at=at) if beside else Faults().kill("w1", step=3, at=at)
    hurt = run_workers(
        SCRIPT,
        one.workers,
        directory=tmp_path / "run",
        options=[*PATIENT, *one.options],
        arguments=[one.script, *one.arguments],
        faults=fault,
        timeout_s=WAIT_S,
    )
    assert hurt.exit_code == 0, hurt.output
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert hurt.digests == calm.digests, hurt.output
    assert hurt.final == calm.final, hurt.output
    assert hurt.evaluations == calm.evaluations, hurt.output
