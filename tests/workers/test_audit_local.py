"""``unisono run --audit`` with ``run.local_steps``: a round is done again without the wrong worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.trainings import Training
from unisono.testing import Faults

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

# Without --even a worker that is late may get nothing to compute, which could be wrong; and two may be lost in a round.
train = Training("local_training.py", "--rounds", 5, "--even", "--copies", 3)

# "committed": after the loss two members compute the last replica together, and then the disputed one each by itself.
CASES = [("kept", "gradient", "committed"), ("kept", "parameter", "local.placed")]
MORE = [("fresh", "gradient", ""), ("kept", "gradient", ""), ("kept", "gradient", "talked")]


@pytest.mark.parametrize(("state", "value", "at"), [*CASES, *MORE] if ALL else CASES)
def test_a_wrong_worker_is_found_and_the_round_done_again(state: str, value: str, at: str, tmp_path: Path) -> None:
    """Also where another worker is lost while the round is done again."""
    arguments = ("--inner-state", state, "--replicas", "6")
    calm = train(tmp_path / "calm", 1, arguments=arguments)
    faults = Faults().corrupt("w1", value, step=2, lasting=value == "gradient")
    if at:
        faults = faults.kill("w0", step=2, at=at, skip=1)
    found = train(tmp_path / "run", 4, faults, [*PATIENT, "--audit", "0.5", "--set", "audit-then=go-on"], arguments)
    assert found.exit_code == 0, found.output
    assert (found.digests, found.final, found.evaluations) == (calm.digests, calm.final, calm.evaluations), found.output
    assert re.search(r"\bw1 on host \S+ computes wrong values", found.output)
    assert not re.search(r"\bw[023] on host \S+ computes wrong values", found.output)
