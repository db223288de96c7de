"""Workers leave a run of local steps: what only they hold goes to those that stay, and not one bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.record.journal import compare
from unisono.testing import Faults, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("local_training.py")
ROUNDS = 6


@pytest.mark.parametrize(("copies", "lost"), [(1, ""), (2, ""), (2, "w1"), (2, "w2")] if ALL else [(2, ""), (2, "w2")])
def test_all_workers_with_the_state_of_a_replica_may_leave_together(
    copies: int, lost: str, unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of them as there are copies; also if one is lost while the states move."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calm, directory = tmp_path / "calm", tmp_path / "run"
    arguments = ["--rounds", str(ROUNDS), "--copies", str(copies)]
    outcome = run_workers(SCRIPT, 1, directory=calm, arguments=arguments)
    assert outcome.exit_code == 0, outcome.output
    if lost:
        for name, value in Faults().kill(lost, at="states.moving").environment().items():
            monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (2,)) as gates:
        options = (*PATIENT, "-n", 3, "--run-dir", directory, "--max-restarts", 0)
        command = unisono("run", SCRIPT, *options, "--", *arguments, "--gates", gates.folder)
        gates.wait(2)
        assert unisono("scale", directory, 1).wait() == 0
        gates.open(2, command.generation("leave"))
        assert command.wait() == 0, command.err
    assert compare(calm, directory).startswith(f"identical: {ROUNDS} steps")
