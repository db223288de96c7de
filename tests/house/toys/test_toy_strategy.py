"""A strategy is one file and the row that chooses it, and so is a tap: proved by two that stand outside."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.house.toys import toy_strategy
from tests.waiting import WAIT_S
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(toy_strategy.__file__)
MOST_LINES = 130


def run(directory: Path, workers: int, *options: str, steps: int = 6, faults: Faults | None = None) -> Outcome:
    outcome = run_workers(
        SCRIPT, workers, directory=directory, arguments=[str(steps)], options=options, faults=faults, timeout_s=WAIT_S
    )
    assert outcome.exit_code == 0, outcome.output
    return outcome


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("at", ["", "after_backward", "states.moving", "states.delivering", "states.moved"])
def test_another_strategy_gives_the_same_bits_on_any_workers_and_survives_a_loss(at: str, tmp_path: Path) -> None:
    """The gradients that wait are on two workers each, and come to all; a tap is told each sum."""
    alone = run(tmp_path / "alone", 1)
    team = run(tmp_path / "team", 4, faults=Faults().kill("w1", step=2, at=at) if at else None)
    assert (team.digests, team.final) == (alone.digests, alone.final)
    assert len(set(alone.digests)) == 6
    assert (team.generations[0] != team.generations[-1]) == bool(at), team.output
    steps = [line for line in team.lines if line["kind"] == "step"]
    assert [line["logs"]["seen"] for line in steps] == [line["loss"] for line in steps]
    assert {line["logs"]["late"] for line in steps} == {4}, "the gradients of four parameters wait"
    assert {line["logs"]["here"] for line in steps} <= {2, 3}, "no worker holds all of them"


@pytest.mark.usefixtures("nursery")
def test_its_checkpoint_has_what_no_worker_holds_alone(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", 1)
    run(tmp_path / "first", 4, steps=3)
    again = run(tmp_path / "second", 3, "--resume", str(tmp_path / "first"))
    assert (again.digests, again.final) == (alone.digests, alone.final)


def test_it_is_short() -> None:
    parts = (toy_strategy.Window, toy_strategy.Coming, toy_strategy.Late, toy_strategy.LateStep)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) < MOST_LINES
