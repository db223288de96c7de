"""A Trainer of Lightning on any number of workers, and not one bit changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.lightning_training import STEPS
from tests.workers.conftest import Unisono, mark, run_nursery, unisono
from tests.workers.gates import Gates
from unisono.journal import compare, times
from unisono.testing import Faults, Outcome, run_workers

__all__ = ["mark", "unisono"]

SCRIPT = Path(__file__).with_name("lightning_training.py")
LOGS = Path("log/version_0/metrics.csv")


@pytest.fixture(scope="session")
def lightning_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Has imported Lightning, so that no worker does."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path, also=("lightning.pytorch", "torchmetrics.classification")):
        yield path


@pytest.fixture(autouse=True)
def nursery(lightning_nursery: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_NURSERY", lightning_nursery)


def run(folder: Path, workers: int, *arguments: str) -> Outcome:
    outcome = run_workers(SCRIPT, workers, directory=folder / "run", arguments=["--root", str(folder), *arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome


def test_workers_that_are_lost_and_replaced_change_no_bit_and_no_logged_value(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(tmp_path / "plain", 1, "--plain")
    alone = run(tmp_path / "alone", 1)
    assert {name: alone.final[name] for name in plain.final} == plain.final
    assert set(plain.final) == {"model", "optimizer", "scheduler"}

    faults = Faults().kill("w1", step=4, at="after_backward").kill("w2", step=8, at="in_evaluation")
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "hurt"
    with Gates(tmp_path / "gates", [12]) as gates:
        options = ("-n", 3, "--run-dir", folder / "run")
        command = unisono("run", SCRIPT, *options, "--", "--root", folder, "--gates", gates.folder)
        gates.open(12, command.generation("w3 joins"))
        assert command.wait() == 0, command.err
    assert compare(tmp_path / "alone" / "run", folder / "run").startswith(f"identical: {STEPS} steps")
    assert "w3" in times.by_step(folder / "run")[STEPS - 1]
    assert (folder / LOGS).read_text() == (tmp_path / "alone" / LOGS).read_text()
