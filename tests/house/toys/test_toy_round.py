"""A new kind of round is one file against the protocol of `unisono.engine.rounds`: proved by one that stands
outside.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.house.toys import toy_round
from tests.waiting import WAIT_S
from unisono.testing import Outcome, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(toy_round.__file__)
MOST_LINES = 80


def norms(outcome: Outcome) -> list[dict[str, Any]]:
    return [line["logs"] for line in outcome.lines if line["kind"] == "step"]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("is_hurt", [False, True], ids=["calm", "one dies in the middle of it"])
def test_a_round_of_another_kind_gives_all_workers_the_same_and_survives_a_loss(is_hurt: bool, tmp_path: Path) -> None:
    alone = run_workers(SCRIPT, 1, directory=tmp_path / "alone", timeout_s=WAIT_S)
    arguments = ["--die", str(tmp_path / "died")] if is_hurt else []
    team = run_workers(SCRIPT, 3, directory=tmp_path / "team", arguments=arguments, timeout_s=WAIT_S)
    assert (tmp_path / "died").exists() == is_hurt
    assert (team.digests, team.final) == (alone.digests, alone.final)
    assert norms(team) == norms(alone)
    assert len(norms(team)[0]) == 8
    assert (team.generations[0] != team.generations[1]) == is_hurt


def test_it_is_short() -> None:
    assert len(inspect.getsource(toy_round.Norms).splitlines()) < MOST_LINES
