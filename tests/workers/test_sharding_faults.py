"""Losses with a sharded optimizer: wherever in an update, or while states move, a worker is lost, no bit changes.

By default a sample: every point of the update on three workers of one host, and others over a network. UNISONO_TEST_ALL
runs every point x rank x number of workers x exchange.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.trainings import Training
from unisono.record.journal import compare
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

STEPS = 8
STEP = 3
UPDATE_POINTS = ["shard.updated", "shard.delivered", "shard.committed"]
NEAR_POINTS = ["reduced", "committed", "after_step"]
MOVE_POINTS = ["states.moving", "states.delivering", "states.moved"]
DELIVERY_POINTS = {
    "shared": ["deliver.staged"],
    "gloo": ["deliver.sent", "deliver.received"],
    "two-level": ["deliver.staged"],
}
"""Those that a delivery comes to in an exchange; with two copies on two hosts nothing crosses."""
NORMS_POINT = "shard.norms"
CHECKPOINT_POINTS = ["shard.in_lending", "shard.loading"]
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--set", "simulate-hosts=2"]}
MIXED = {"mixed": ["two-level", "--set", "simulate-hosts=3"]}
"""Of four workers: two on one host, and two that are alone on theirs."""
ALONE = [*PATIENT, "--max-restarts", "0"]

WAYS = {
    "whole": [],
    "host": ["--parameters", "host"],
    "owners": ["--gradients", "owners"],
    "both": ["--parameters", "host", "--gradients", "owners"],
}
"""Who has a copy of the parameters, and who gets gradients."""
Case = tuple[str, int, str, int]
"""Exchange, number of workers, point, rank: who is killed where."""


def all_cases(points: Sequence[str], *sizes: int) -> Iterator[Case]:
    for exchange in EXCHANGES:
        for workers in sizes:
            for at in points:
                for rank in range(workers):
                    yield exchange, workers, at, rank


SAMPLE = [
    ("shared", 3, "shard.updated", 0),
    ("shared", 3, "shard.delivered", 1),
    ("shared", 3, "shard.committed", 2),
    ("shared", 2, "committed", 0),
    ("gloo", 3, "shard.updated", 1),
    ("two-level", 4, "shard.delivered", 2),
    ("shared", 3, "deliver.staged", 0),
    ("gloo", 3, "deliver.sent", 1),
    ("two-level", 4, "deliver.staged", 3),
]
MOVES = [("shared", 4, "states.moving", 1), ("gloo", 4, "states.moved", 2)]
if ALL:
    SAMPLE, MOVES = list(all_cases([*UPDATE_POINTS, *NEAR_POINTS], 2, 3)), list(all_cases(MOVE_POINTS, 4))
    SAMPLE += [
        (exchange, workers, at, rank)
        for exchange, points in DELIVERY_POINTS.items()
        for workers in (3, 4)  # with 2 workers and 2 copies, nothing is delivered
        for at in points
        for rank in range(workers)
        if (exchange, workers) != ("two-level", 3)
    ]
    NEW = [(case, "owners") for case in SAMPLE]
    # Where each host has one copy, and an owner, nothing is delivered.
    NEW += [(case, way) for case in SAMPLE if not case[2].startswith("deliver.") for way in ("host", "both")]
    places = list(itertools.product([*UPDATE_POINTS, *NEAR_POINTS], range(4)))
    # The second member of the first host sends nothing to other hosts.
    places += itertools.product(["deliver.sent", "deliver.received"], (0, 2, 3))
    NEW += [(("mixed", 4, at, rank), way) for at, rank in places for way in ("host", "both")]
else:
    NEW = [
        (("shared", 3, "shard.updated", 0), "host"),
        (("shared", 3, "shard.delivered", 1), "both"),
        (("shared", 2, "shard.committed", 0), "host"),
        (("shared", 3, "reduced", 1), "owners"),
        (("gloo", 3, "committed", 2), "both"),
        (("gloo", 3, "shard.updated", 1), "host"),
        (("two-level", 4, "shard.delivered", 2), "both"),
        (("mixed", 4, "deliver.received", 0), "host"),
        (("mixed", 4, "deliver.sent", 3), "both"),
        (("mixed", 4, "shard.updated", 2), "host"),
        (("two-level", 3, "shard.updated", 1), "owners"),
    ]
CASES = [(*case, way) for case, way in [*((one, "whole") for one in SAMPLE), *NEW]]


def run(
    directory: Path,
    workers: int | str,
    copies: int,
    faults: Faults | None = None,
    options: Sequence[str] = ALONE,
    arguments: Sequence[str] = (),
) -> Outcome:
    return Training("sharded_training.py", "--copies", copies)(directory, workers, faults, options, arguments)


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """One worker with the replicated optimizer, to which nothing happens."""
    directory = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        outcome = run(directory, 1, 0)
    assert outcome.exit_code == 0, outcome.output
    assert len(set(outcome.digests)) == STEPS
    return directory, outcome


def assert_same_bits(directory: Path, hurt: Outcome, calm: tuple[Path, Outcome]) -> None:
    assert hurt.exit_code == 0, hurt.output
    assert hurt.digests == calm[1].digests, hurt.output
    assert hurt.final == calm[1].final, hurt.output
    assert compare(calm[0], directory).startswith("identical: ")


def test_the_points_are_those_that_there_are() -> None:
    assert sorted(at for at in POINTS if at.startswith(("shard.", "states."))) == sorted(
        [*UPDATE_POINTS, *MOVE_POINTS, *CHECKPOINT_POINTS, NORMS_POINT]
    )


@pytest.mark.parametrize(("exchange", "workers", "at", "rank", "way"), CASES)
def test_a_kill_in_an_update_changes_no_bit(
    exchange: str, workers: int, at: str, rank: int, way: str, calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Two copies, one loss: the others have what it had, whoever has heard of the end of the update and who has not."""
    options = [*ALONE, "--exchange", *(EXCHANGES | MIXED)[exchange]]
    hurt = run(tmp_path / "run", workers, 2, Faults().kill(f"w{rank}", step=STEP, at=at), options, WAYS[way])
    assert f"w{rank}" in ended_workers(hurt.output), hurt.output
    assert_same_bits(tmp_path / "run", hurt, calm)
    assert max(hurt.generations) > 1


@pytest.mark.parametrize("exchange", ["two-level", "mixed"])
def test_values_come_to_hosts_that_own_nothing(exchange: str, calm: tuple[Path, Outcome], tmp_path: Path) -> None:
    """One copy of each state: one member of each other host gets the new value, for all of that host."""
    options = [*ALONE, "--exchange", *(EXCHANGES | MIXED)[exchange]]
    assert_same_bits(tmp_path / "run", run(tmp_path / "run", 4, 1, None, options, WAYS["both"]), calm)


def test_new_parameters_do_not_travel_to_hosts_that_have_computed_them(
    calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Two copies on two hosts: on each of them somebody has the new value."""
    options = [*ALONE, "--exchange", *EXCHANGES["two-level"]]
    sent = []
    for copies in (2, 0):
        outcome = run(tmp_path / str(copies), 4, copies, options=options, arguments=["--unbalanced"])
        assert_same_bits(tmp_path / str(copies), outcome, calm)
        # A host to which the balance gives no micro-batch sends less: what counts is a step with all of it.
        sent.append(max(line["sent_bytes"] for line in outcome.lines if line["kind"] == "step"))
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(("at", "rank"), [("shard.updated", 1), ("shard.committed", 0)])
def test_a_newcomer_takes_the_place_of_a_lost_worker(
    at: str, rank: int, calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """It comes with no state, and gets its part after the first update."""
    hurt = run(tmp_path / "run", "3:3", 2, Faults().kill(f"w{rank}", step=STEP, at=at), PATIENT)
    assert f"w{rank}" in ended_workers(hurt.output), hurt.output
    assert_same_bits(tmp_path / "run", hurt, calm)
    held = [line.split(" holds ")[1].split() for line in hurt.output.splitlines() if " holds " in line]
    assert len(held) == 3, hurt.output
    assert all(0 < len(each) < 8 for each in held), hurt.output
    assert sorted(index for each in held for index in each) == sorted(2 * list("01234567"))


@pytest.mark.parametrize(("exchange", "workers", "at", "rank"), MOVES)
def test_a_kill_while_states_move_changes_no_bit(
    exchange: str, workers: int, at: str, rank: int, calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Three copies: a worker is lost in a step, and another one when the states of that one move."""
    first = (rank + 1) % workers
    faults = Faults().kill(f"w{first}", step=STEP, at="after_backward").kill(f"w{rank}", step=STEP, at=at)
    options = [*ALONE, "--exchange", *EXCHANGES[exchange]]
    hurt = run(tmp_path / "run", workers, 3, faults, options)
    assert {f"w{rank}", f"w{first}"} <= ended_workers(hurt.output), hurt.output
    assert_same_bits(tmp_path / "run", hurt, calm)


def test_two_workers_lost_at_the_same_point_of_an_update_with_three_copies(
    calm: tuple[Path, Outcome], tmp_path: Path
) -> None:
    faults = Faults().kill("w0", step=STEP, at="shard.updated").kill("w2", step=STEP, at="shard.updated")
    hurt = run(tmp_path / "run", 4, 3, faults)
    assert {"w0", "w2"} <= ended_workers(hurt.output), hurt.output
    assert_same_bits(tmp_path / "run", hurt, calm)


def test_one_loss_after_the_other_down_to_one_worker(calm: tuple[Path, Outcome], tmp_path: Path) -> None:
    """After a loss the states get their copies again, so the next one is survived as well."""
    faults = (
        Faults()
        .kill("w3", step=1, at="after_backward")
        .kill("w0", step=3, at="shard.delivered")
        .kill("w2", step=5, at="after_backward")
    )
    hurt = run(tmp_path / "run", 4, 2, faults)
    assert_same_bits(tmp_path / "run", hurt, calm)
    assert [len(workers) for workers in hurt.times.values()][-1] == 1
    assert "w1 holds 0 1 2 3 4 5 6 7" in hurt.output or "w0 holds 0 1 2 3 4 5 6 7" in hurt.output


@pytest.mark.parametrize("at", [NORMS_POINT, "committed"])
def test_gradients_that_are_clipped_by_the_norm_of_all_survive_a_loss(at: str, tmp_path: Path) -> None:
    """Two copies of each gradient: the norms of the lost worker are those of another one. The bits are torch's."""
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    alone = run(calm, 1, 0, arguments=["--clip", "0.1"])  # here it is the function of torch
    assert alone.exit_code == 0, alone.output
    arguments = ["--clip", "0.1", *WAYS["owners"]]
    outcome = run(hurt, 3, 2, Faults().kill("w1", step=STEP, at=at), arguments=arguments)
    assert "w1" in ended_workers(outcome.output), outcome.output
    assert outcome.exit_code == 0, outcome.output
    assert compare(calm, hurt).startswith("identical: ")


def test_a_gradient_is_lost_with_all_of_its_owners(tmp_path: Path) -> None:
    """With one copy: the sum went to the worker that is killed before it has updated anything."""
    arguments = ["--optimizer", "sgd", *WAYS["owners"]]
    faults = Faults().kill("w1", step=STEP, at="shard.updated")
    outcome = run(tmp_path / "run", 3, 1, faults, arguments=arguments)
    assert outcome.exit_code != 0, outcome.output
    assert re.search(r"the new value of parameter \d of optimizer was held by w1 .*copies=1", outcome.output)


@pytest.mark.parametrize("at", ["before_combine", "shard.delivered"])
def test_without_states_one_copy_survives_a_loss_too(at: str, tmp_path: Path) -> None:
    """SGD without momentum: whoever is left can compute any update that has not begun, and has the values of one that
    is delivered.
    """
    arguments = ["--optimizer", "sgd"]
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    run(calm, 1, 0, None, arguments=arguments)
    faults = Faults().kill("w1", step=2, at="after_backward").kill("w0", step=STEP, at=at)
    outcome = run(hurt, 3, 1, faults, arguments=arguments)
    assert {"w0", "w1"} <= ended_workers(outcome.output), outcome.output
    assert outcome.exit_code == 0, outcome.output
    assert compare(calm, hurt).startswith("identical: ")


def test_with_all_copies_the_run_ends_and_says_what_was_lost(tmp_path: Path) -> None:
    """The run goes on from the newest checkpoint, which the error names."""
    faults = Faults().kill("w1", step=60, at="before_combine")  # long after the first checkpoint was begun
    hurt = run(tmp_path / "run", 3, 1, faults, arguments=["--checkpoint-every", "2", "--steps", "80"])
    assert hurt.exit_code != 0
    assert "was held by w1 (unisono.shard with copies=1)" in hurt.output, hurt.output
    assert "StateLost" in hurt.output
    assert re.search(r"Resume from the newest checkpoint, .*/checkpoints/step-\d+ ", hurt.output), hurt.output
    assert not [line for line in hurt.lines if line["kind"] == "step"][60:]


def test_a_state_that_is_lost_with_the_update_that_made_it_is_not_begun_anew(tmp_path: Path) -> None:
    """One copy, and the first update: its new parameters have come to all, its first moments were on one worker."""
    hurt = run(tmp_path / "run", 3, 1, Faults().kill("w1", step=0, at="shard.delivered"))
    assert hurt.exit_code != 0, hurt.output
    assert "was held by w1 (unisono.shard with copies=1)" in hurt.output, hurt.output
    assert not [line for line in hurt.lines if line["kind"] == "step"][1:]
