"""A run with groups of workers: each is told its part of the model before its script runs, and a replacement has the
part of the lost one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import unisono as library
from tests.workers.conftest import Unisono
from unisono.cluster.worker.member import current

pytestmark = pytest.mark.more

SCRIPT = """
import os, signal
from unisono.cluster.worker.member import current

member = current()
print("part", member.part, "of", member.spec.run.settings.parts, flush=True)
if member.worker_id == "w1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_know_their_parts_and_a_lost_one_is_replaced_in_its_part(
    unisono: Unisono, script: Callable[[str], str]
) -> None:
    command = unisono("run", script(SCRIPT), "--workers", "2x2")
    assert command.wait() == 0, command.err
    told = sorted(line for line in command.out if "part" in line)
    assert told == [f"[w{number}] part {part} of 2" for number, part in enumerate((0, 1, 0, 1, 1))]


def test_a_function_may_be_called_on_groups() -> None:
    assert library.launch(lambda: current().part, workers="1x2") == 0  # type: ignore[union-attr]
