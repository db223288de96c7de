"""Where workers meet over a slow network, fewer nodes travel, with the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from tests.workers.uneven_training import NUM_LEAVES
from unisono.core.tree import cover
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.usefixtures("nursery")

SCRIPT = Path(__file__).with_name("uneven_training.py")
STEPS = 16
EACH_S, SLOW_S = 0.01, 0.3
"""How long a micro-batch and an exchange take every worker, by a clock that nothing else moves."""


def test_a_slow_exchange_makes_the_cuts_coarse(tmp_path: Path) -> None:
    """Of 8 micro-batches 3 workers get 3, 3 and 2 at first, which are 5 nodes; soon each sends only one."""
    slow = Faults()
    for step in range(STEPS):
        slow = slow.delay("", SLOW_S, step=step, at="reduced")
    arguments = ["--steps", str(STEPS), "--own-clock", "--each-s", str(EACH_S)]
    options = [*PATIENT, "--exchange", "gloo"]
    calm = run_workers(SCRIPT, 1, directory=tmp_path / "calm", arguments=arguments, timeout_s=WAIT_S)
    hurt = run_workers(
        SCRIPT, 3, directory=tmp_path / "hurt", arguments=arguments, options=options, faults=slow, timeout_s=WAIT_S
    )
    assert hurt.exit_code == 0, hurt.output
    assert hurt.digests == calm.digests
    first, last = ([int(told["leaves"] or 0) for told in hurt.times[step].values()] for step in (0, STEPS - 1))
    assert sorted(first) == [2, 3, 3]
    edges = [0, *itertools.accumulate(last)]
    assert all(len(cover(a, b, NUM_LEAVES)) <= 1 for a, b in itertools.pairwise(edges)), last
