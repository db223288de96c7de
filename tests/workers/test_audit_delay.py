"""``unisono run --audit`` with ``run.steps(delay=D)``: what is under way is done again without the wrong worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.trainings import Training
from unisono.testing import Faults, Outcome

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

# Without --even a worker that is late may get nothing to compute, which could be wrong.
train = Training("delayed_training.py", "--steps", 14, "--even")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    found = train(tmp_path_factory.mktemp("calm") / "run", 1)
    assert found.exit_code == 0, found.output
    return found


LOST = [("w0", "delay.again"), ("w1", "talked")]
MORE = [("", ""), ("w0", "committed"), ("w0", "in_talk")]


@pytest.mark.parametrize(("lost", "at"), [*LOST, *MORE] if ALL else LOST)
def test_a_worker_that_computes_wrong_gradients_is_found_and_no_bit_changes(
    lost: str, at: str, calm: Outcome, tmp_path: Path
) -> None:
    """Also where a worker is lost meanwhile: one that computes again what was under way, or the one that is wrong."""
    faults = Faults().corrupt("w1", "gradient", step=9, lasting=True)
    if lost:
        faults = faults.kill(lost, step=11, at=at)
    found = train(tmp_path / "run", 4, faults, [*PATIENT, "--audit", "0.5", "--set", "audit-then=go-on"])
    assert found.exit_code == 0, found.output
    assert (found.digests, found.final, found.evaluations) == (calm.digests, calm.final, calm.evaluations), found.output
    assert re.search(r"\bw1 on host \S+ computes wrong values", found.output)
    assert not re.search(r"\bw[023] on host \S+ computes wrong values", found.output)


def test_a_loss_may_cost_the_audit_of_a_sum_and_then_its_steps_are_said_to_be_in_doubt(
    calm: Outcome, tmp_path: Path
) -> None:
    """The worker is lost while it waits for the sum of step 9. If the others have that sum, they audit it; if not, they
    complete it with what they hold, which is not audited, and the wrong worker is found in a later step.
    """
    faults = Faults().corrupt("w1", "gradient", step=9, lasting=True).kill("w0", step=11, at="delay.waiting")
    found = train(tmp_path / "run", 4, faults, [*PATIENT, "--audit", "0.5", "--set", "audit-then=go-on"])
    assert found.exit_code == 0, found.output
    assert re.search(r"\bw1 on host \S+ computes wrong values", found.output)
    assert not re.search(r"\bw[023] on host \S+ computes wrong values", found.output)
    pairs = enumerate(zip(found.digests, calm.digests, strict=True))
    if (wrong := next((step for step, (one, other) in pairs if one != other), None)) is not None:
        doubted = re.search(r"computed in the steps (\d+) to (\d+) is doubtful", found.output)
        assert doubted is not None, found.output
        assert int(doubted[1]) <= wrong <= int(doubted[2]), found.output


def test_a_run_goes_back_to_a_checkpoint_that_holds_no_wrong_gradient(tmp_path: Path) -> None:
    """A checkpoint holds the gradients that are under way as well."""
    calm = train(tmp_path / "calm", 1, arguments=["--every", 2])
    faults = Faults().corrupt("w3", "gradient", step=9, lasting=True)  # the second start has no such worker
    found = train(tmp_path / "run", 4, faults, [*PATIENT, "--audit", "0.04"], ["--every", 2])
    assert found.exit_code == 0, found.output
    assert re.search(r"goes back to step-000000000\d, with 3 workers", found.output)
    assert (found.digests, found.final) == (calm.digests, calm.final)
