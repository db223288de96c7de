"""A new exchange is one file against the protocol of `unisono.engine.exchange`: proved by one that stands outside."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.house.toys import toy_exchange
from tests.waiting import WAIT_S
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(toy_exchange.__file__)
MOST_LINES = 80


@pytest.fixture
def alone(nursery: None, tmp_path: Path) -> Outcome:
    return run_workers(SCRIPT, 1, directory=tmp_path / "alone", timeout_s=WAIT_S)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("at", ["", "published", "reduced", "committed"])
def test_an_exchange_of_another_kind_gives_the_same_bits_and_survives_a_loss(
    at: str, alone: Outcome, tmp_path: Path
) -> None:
    faults = Faults().kill("w1", step=3, at=at) if at else None
    team = run_workers(
        SCRIPT, 3, directory=tmp_path / "run", options=["--exchange", "toy"], faults=faults, timeout_s=WAIT_S
    )
    assert (team.exit_code, alone.exit_code) == (0, 0), team.output
    assert (team.digests, team.final) == (alone.digests, alone.final)
    assert (len(set(team.generations)) > 1) == bool(at)


def test_it_is_short() -> None:
    sources = [inspect.getsource(kind) for kind in (toy_exchange.StoreExchange, toy_exchange.StoreCombine)]
    assert sum(len(source.splitlines()) for source in sources) < MOST_LINES
