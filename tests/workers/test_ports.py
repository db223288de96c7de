"""Whole programs, with few changed lines, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from tests.workers.ports import LIKE_FOR_LIKE, PORTS
from unisono.record.journal import compare
from unisono.testing import run_workers

pytestmark = pytest.mark.usefixtures("nursery")


@pytest.mark.parametrize("name", PORTS)
def test_a_whole_program_needs_few_lines_and_gives_the_same_figures(name: str, tmp_path: Path) -> None:
    port = PORTS[name]
    assert port.count() == port.lines
    script, said = tmp_path / "train.py", []
    script.write_text(port.ported)
    for workers in (1, 2):
        outcome = run_workers(script, workers, directory=tmp_path / str(workers), options=PATIENT, timeout_s=WAIT_S)
        assert outcome.exit_code == 0, outcome.output
        lines = [line.partition("] ")[2] for line in outcome.output.splitlines() if line.startswith("[w")]
        said.append({line for line in lines if line})
        assert len(lines) == workers * len(said[0]), "every worker prints the same"
    assert said[0] == said[1]
    assert compare(tmp_path / "1", tmp_path / "2").startswith("identical: ")


@pytest.mark.parametrize("name", LIKE_FOR_LIKE)
def test_with_the_prints_left_as_they_are_it_needs_no_more_lines_than_elsewhere(name: str, tmp_path: Path) -> None:
    port = LIKE_FOR_LIKE[name]
    assert port.count() == port.lines
    script = tmp_path / "train.py"
    script.write_text(port.ported)
    tested = []
    for workers in (1, 2):
        outcome = run_workers(script, workers, directory=tmp_path / str(workers), options=PATIENT, timeout_s=WAIT_S)
        assert outcome.exit_code == 0, outcome.output
        lines = [line.partition("] ")[2] for line in outcome.output.splitlines() if line.startswith("[w")]
        tested.append({line for line in lines if "Test set" in line or "PSNR" in line})
    assert tested[0] == tested[1], "each worker goes through the whole test set"
    assert compare(tmp_path / "1", tmp_path / "2").startswith("identical: ")
