"""A new sink is one class against the protocol of `unisono.views.watch`: proved by one that stands outside."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.house.toys import toy_sink
from tests.waiting import WAIT_S
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(toy_sink.__file__)
MOST_LINES = 80


@pytest.fixture
def calm(nursery: None, tmp_path: Path) -> Outcome:
    """The same run without sinks and without a loss."""
    return run_workers(SCRIPT, 1, directory=tmp_path / "calm", timeout_s=WAIT_S)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("worker", ["w0", "w1"])
def test_a_sink_gets_every_step_once_and_in_order_whoever_is_killed(worker: str, calm: Outcome, tmp_path: Path) -> None:
    """Killed after the step and before its line: the other worker's sink gets what it has told nobody."""
    told, faults = tmp_path / "told", Faults().kill(worker, at="after_step", step=3)
    hurt = run_workers(SCRIPT, 2, directory=tmp_path / "hurt", arguments=[str(told)], faults=faults, timeout_s=WAIT_S)
    assert (calm.exit_code, hurt.exit_code) == (0, 0), hurt.output
    assert f"worker {worker}" in hurt.output
    assert (hurt.digests, hurt.final) == (calm.digests, calm.final)
    lines = [line.split() for line in told.read_text().splitlines()]
    assert [(int(rest[0]), rest[1]) for kind, *rest in lines if kind == "step"] == list(enumerate(calm.digests))
    assert (lines[0], lines[1], lines[-1]) == (["RunStarted"], ["MembershipChanged"], ["RunEnded"])
    assert hurt.output.count("the sink Broken gets no more events: its emit(RunStarted) raised RuntimeError") > 0


def test_it_is_short() -> None:
    assert len(inspect.getsource(toy_sink.StepFile).splitlines()) < MOST_LINES
