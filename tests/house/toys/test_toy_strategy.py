"""A strategy is one file and the row that chooses it, and so is a tap: proved by two that stand outside."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.house.toys import toy_strategy
from tests.waiting import WAIT_S
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(toy_strategy.__file__)
MOST_LINES = 40


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("is_hurt", [False, True], ids=["calm", "one dies in the middle of a step"])
def test_another_strategy_gives_the_same_bits_on_any_workers_and_survives_a_loss(is_hurt: bool, tmp_path: Path) -> None:
    """A worker that joins has the gradient that is not applied yet, and a tap is told each sum."""
    alone = run_workers(SCRIPT, 1, directory=tmp_path / "alone", timeout_s=WAIT_S)
    faults = Faults().kill("w1", step=2, at="after_backward") if is_hurt else None
    team = run_workers(SCRIPT, 3, directory=tmp_path / "team", faults=faults, timeout_s=WAIT_S)
    assert alone.exit_code == team.exit_code == 0, alone.output + team.output
    assert (team.digests, team.final) == (alone.digests, alone.final)
    assert len(set(alone.digests)) == 6
    assert (team.generations[0] != team.generations[-1]) == is_hurt
    steps = [line for line in team.lines if line["kind"] == "step"]
    assert [line["logs"]["seen"] for line in steps] == [line["loss"] for line in steps]
    assert {line["logs"]["late"] for line in steps} == {4}, "the gradients of four parameters wait"


def test_it_is_short() -> None:
    parts = (toy_strategy.Window, toy_strategy.Late, toy_strategy.LateStep)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) < MOST_LINES
