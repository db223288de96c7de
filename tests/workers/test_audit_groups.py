"""``--audit`` in groups: another group computes a micro-batch again, and the first place with other bits says who."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.trainings import Training
from unisono.record.journal import compare
from unisono.testing import Faults, Outcome

STEPS = 10
GO_ON = ["--audit", "0.5", "--set", "audit-then=go-on"]
pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]


def train(
    directory: Path, layout: str, *options: str, faults: Faults | None = None, more: tuple[str, ...] = ()
) -> Outcome:
    training = Training("staged_training.py", "--kind", "transformer", "--unbalanced", "--steps", str(STEPS), *more)
    return training(directory, layout, faults, [*PATIENT, *options])


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    directory = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        found = train(directory, "1")
    assert found.exit_code == 0, found.output
    return directory, found


def convicted(output: str) -> set[str]:
    return set(re.findall(r"\b(w\d+) on host \S+ computes wrong values", output))


WRONG = [
    # value, worker, what is said of it
    ("gradient", "w2", r"the gradient of part 0 in micro-batch \d of step \d"),
    ("gradient", "w3", r"the gradient of part 1 in micro-batch \d of step \d"),
    ("activations", "w2", r"the output of part 0 in micro-batch \d of step \d"),
]


@pytest.mark.parametrize(("value", "worker", "words"), WRONG)
def test_the_worker_that_is_first_to_have_other_bits_is_evicted_and_no_bit_changes(
    value: str, worker: str, words: str, calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """All parts of its group have other bits where its activations are wrong."""
    faults = Faults().corrupt(worker, value, step=4, lasting=True)
    found = train(tmp_path / "run", "3x2", *GO_ON, faults=faults)
    assert found.exit_code == 0, found.output
    assert convicted(found.output) == {worker}, found.output
    assert re.search(
        rf"{worker} on host \S+ computes wrong values on device cpu: {words} has different bits", found.output
    )
    assert "replaces" not in found.output
    assert (found.digests, found.final) == (calm[1].digests, calm[1].final), found.output
    assert compare(calm[0], tmp_path / "run").startswith(f"identical: {STEPS} steps")


def test_whose_bits_are_wrong_in_the_middle_of_three_parts_and_come_and_go(
    calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Parts after it have other bits forward, and those before it other gradients."""
    faults = Faults().corrupt("w4", "activations", step=2, lasting=True, every=3)
    found = train(tmp_path / "run", "3x3", *GO_ON, faults=faults)
    assert found.exit_code == 0, found.output
    assert convicted(found.output) == {"w4"}, found.output
    assert "the fault is intermittent" in found.output


def test_the_journal_has_the_digests_that_one_process_gets(calm: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Those of the parts add up. Audited are the micro-batches of groups, whatever their size."""
    found: list[dict[tuple[int, str], str]] = []
    for layout in ("2", "2x2", "2x3"):
        outcome = train(tmp_path / layout, layout, "--audit", "0.25")
        assert outcome.exit_code == 0, outcome.output
        assert (outcome.digests, outcome.final) == (calm[1].digests, calm[1].final)
        lines = [(line["step"], line["audits"]) for line in outcome.lines if line.get("audits")]
        found.append({(step, leaf): digest for step, audits in lines for leaf, digest in audits.items()})
    for groups in found[1:]:
        alike = found[0].keys() & groups.keys()
        assert len(alike) >= 8
        assert all(found[0][key] == groups[key] for key in alike)


@pytest.mark.parametrize("value", ["parameter", "optimizer"])
def test_a_state_that_a_worker_of_a_group_has_spoilt_is_found(value: str, tmp_path: Path) -> None:
    """By those of its lane, in the same step or the one after it."""
    found = train(tmp_path / "run", "3x2", *GO_ON, faults=Faults().corrupt("w3", value, step=4))
    assert found.exit_code == 0, found.output
    assert convicted(found.output) == {"w3"}, found.output
    assert re.search(r"its copy of a state of (model|optimizer) of step [45] has", found.output), found.output


AT = [
    # worker; point; how often it has passed by before: the second talk is that in which all compute again
    ("w0", "committed", 0),
    ("w5", "lanes.prepared", 0),
    ("w1", "in_talk", 0),
    ("w3", "talked", 0),
    ("w5", "in_talk", 1),
    ("w0", "talked", 1),
    ("w6", "in_recovery", 0),
]


@pytest.mark.parametrize(("lost", "at", "skip"), AT if ALL else AT[::2])
def test_a_loss_while_it_is_found_out_who_is_wrong_changes_no_bit(
    lost: str, at: str, skip: int, calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    faults = Faults().corrupt("w2", "gradient", step=4, lasting=True).kill(lost, step=4, at=at, skip=skip)
    found = train(tmp_path / "run", "4x2", *GO_ON, faults=faults)
    assert found.exit_code == 0, found.output
    assert (found.digests, found.final) == (calm[1].digests, calm[1].final), found.output
    assert ended_workers(found.output), "nobody was killed"
    assert convicted(found.output) <= {"w2"}, found.output


@pytest.mark.parametrize(("lost", "at"), [("w1", "after_backward"), ("w2", "before_combine"), ("w5", "published")])
def test_a_loss_in_an_audited_step_changes_no_bit_and_blames_nobody(
    lost: str, at: str, calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Others may be in the middle of a micro-batch of another group."""
    found = train(tmp_path / "run", "3x2", *GO_ON, faults=Faults().kill(lost, step=4, at=at))
    assert found.exit_code == 0, found.output
    assert (found.digests, found.final) == (calm[1].digests, calm[1].final), found.output
    assert lost in ended_workers(found.output), found.output
    assert not convicted(found.output), found.output
    assert any(line["step"] > 4 for line in found.lines if line.get("audits")), "audits go on"


def test_two_groups_blame_nobody(tmp_path: Path) -> None:
    faults = Faults().corrupt("w3", "gradient", step=4, lasting=True)
    found = train(tmp_path / "run", "2x2", *GO_ON, faults=faults)
    assert found.exit_code != 0
    assert "audit: two groups can find that one of them is wrong, but not which one" in found.output, found.output
    assert re.search(r"the gradient of part 1 in micro-batch \d of step \d was computed by w1 and w3", found.output)
    assert "with two workers" in found.output
    assert not convicted(found.output)


def test_one_group_audits_nothing_and_says_so(calm: tuple[Path, Outcome], tmp_path: Path) -> None:
    found = train(tmp_path / "run", "1x2", "--audit", "0.5")
    assert found.exit_code == 0, found.output
    assert "audit: one group cannot audit" in found.output
    assert found.digests == calm[1].digests
    assert not any(line.get("audits") for line in found.lines)


def test_a_run_in_groups_goes_back_with_a_group_fewer(calm: tuple[Path, Outcome], tmp_path: Path) -> None:
    faults = Faults().corrupt("w4", "activations", step=8, lasting=True)  # the second start has no such worker
    more = ("--checkpoint-every", "1", "--keep", "99")
    found = train(tmp_path / "run", "3x2", "--audit", "0.3", faults=faults, more=more)
    assert found.exit_code == 0, found.output
    assert re.search(r"worker w4 .* computes wrong values \(the output of part 0 in micro-batch", found.output)
    assert re.search(r"goes back to step-0000000\d+, with 2 groups of 2 workers", found.output), found.output
    assert (found.digests, found.final) == (calm[1].digests, calm[1].final), found.output
