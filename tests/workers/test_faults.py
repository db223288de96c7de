"""A worker that is lost at any point of a step changes no bit: every fault point x rank x number of workers x exchange.

The checks run a part in which every two of point, exchange and number of workers meet. UNISONO_TEST_ALL=1 runs all of
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT, SILENCE_S, WAIT_S
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.small_training import BATCH_SIZE, NUM_SAMPLES
from tests.workers.trainings import Training
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome

pytestmark = pytest.mark.usefixtures("nursery")

run = Training("small_training.py")
STEPS = 8
STEP = 3
"""The step in which something happens; evaluations, and what workers say to each other, are part of the step before."""
STEP_POINTS = [at for at in POINTS if not at.startswith("checkpoint") and "." not in at]
"""Those of a plain training; a point of a strategy has its name before a dot."""
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--set", "simulate-hosts=2"]}
NO_STATE = "no worker with the run's state is left"

Case = tuple[str, int, str, int]
"""Exchange, number of workers, point, rank: who is killed where."""


def all_cases() -> Iterator[Case]:
    for exchange in EXCHANGES:
        for workers in (2, 3, 4):
            for at in STEP_POINTS:
                # In an admission there is one more: the newcomer, in the place of the one that was lost before.
                for rank in range(workers + (at == "in_admission")):
                    yield exchange, workers, at, rank


def representative() -> list[Case]:
    """Each point in every exchange and with every number of workers, of which the first is killed, another, the last.

    Of a newcomer's admission also the newcomer.
    """
    chosen = []
    for number, at in enumerate(STEP_POINTS):
        for place, exchange in enumerate(EXCHANGES):
            workers = (2, 3, 4)[(place + number) % 3]
            rank = (0, 1, workers - 1)[(place + number + number // 3) % 3]
            chosen.append((exchange, workers, at, rank))
    return [*chosen, ("shared", 3, "in_admission", 3)]


def test_in_the_part_that_is_run_every_two_values_meet() -> None:
    """Of exchange, number of workers and point; and at each point both who writes the journal and another is killed."""
    chosen = representative()
    for one, other in ((0, 1), (0, 2), (1, 2)):
        met = {(case[one], case[other]) for case in chosen}
        assert met == {(case[one], case[other]) for case in all_cases()}
    for at in STEP_POINTS:
        assert {rank > 0 for _, _, point, rank in chosen if point == at} == {False, True}


CASES = list(all_cases()) if ALL else representative()


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker to which nothing happens."""
    with served_by(standing_nursery):
        outcome = run(tmp_path_factory.mktemp("calm") / "run", 1)
    assert outcome.exit_code == 0, outcome.output
    assert len(set(outcome.digests)) == STEPS
    return outcome


def totals_of(outcome: Outcome) -> list[dict[str, Any]]:
    """The sums of each step."""
    return [line["totals"] for line in outcome.lines if line["kind"] == "step"]


def assert_same_bits(hurt: Outcome, calm: Outcome) -> None:
    """Gradients, state and evaluations are those of the calm run, and every sample was seen once in each epoch."""
    assert hurt.exit_code == 0, hurt.output
    assert hurt.digests == calm.digests, hurt.output
    assert hurt.final == calm.final, hurt.output
    assert hurt.evaluations == calm.evaluations, hurt.output
    assert [line["line"] for line in hurt.lines] == list(range(len(calm.lines))), "a line is missing, or there twice"
    assert totals_of(hurt) == totals_of(calm), hurt.output
    samples = [line["samples"] for line in hurt.lines if line["kind"] == "step"]
    per_epoch = -(-NUM_SAMPLES // BATCH_SIZE)
    for epoch in range(STEPS // per_epoch):
        assert sum(samples[epoch * per_epoch : (epoch + 1) * per_epoch]) == NUM_SAMPLES


def step_of(at: str) -> int:
    return STEP - 1 if at in ("in_evaluation", "evaluated", "in_talk", "talked") else STEP


@pytest.mark.parametrize(("exchange", "workers", "at", "rank"), CASES)
def test_a_kill_changes_no_bit(exchange: str, workers: int, at: str, rank: int, calm: Outcome, tmp_path: Path) -> None:
    """Whoever is killed, wherever it is: the others finish the step, and all that follows, with the same result."""
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    count: int | str = workers
    if at in ("in_recovery", "in_admission"):
        # Something to recover from, and somebody to admit: with a minimum of workers, the others wait for the newcomer.
        first = (rank + 1) % workers
        faults = Faults().kill(f"w{first}", step=STEP, at="after_backward").kill(f"w{rank}", at=at)
        count = f"{workers}:{workers}" if at == "in_admission" else workers
        num_lost = 2
    else:
        faults = Faults().kill(f"w{rank}", step=step_of(at), at=at)
        num_lost = 1
    hurt = run(tmp_path / "run", count, faults, options)
    assert len(ended_workers(hurt.output)) >= num_lost, f"nobody was killed there:\n{hurt.output}"
    if num_lost == workers and rank < workers:
        assert hurt.exit_code != 0, hurt.output
        assert NO_STATE in hurt.output
        return
    assert_same_bits(hurt, calm)
    assert max(hurt.generations) > 1


@pytest.mark.parametrize("step", [0, STEPS - 1], ids=["first", "last"])
def test_a_step_whose_teller_is_killed_is_counted(step: int, calm: Outcome, tmp_path: Path) -> None:
    """Rank 0 tells of a step after its commit, and may be lost in between."""
    faults = Faults().kill("w0", at="after_step", step=step)
    hurt = run(tmp_path / "run", 2, faults)
    assert_same_bits(hurt, calm)
    assert f"unisono: finished: {STEPS} steps in " in hurt.output


def test_down_to_the_last_worker(calm: Outcome, tmp_path: Path) -> None:
    """One after the other is lost and not replaced; the last one finishes the training."""
    faults = (
        Faults()
        .kill("w0", step=1, at="published")
        .kill("w3", step=3, at="after_backward")
        .kill("w1", step=5, at="committed")
    )
    hurt = run(tmp_path / "run", 4, faults, [*PATIENT, "--max-restarts", "0"])
    assert_same_bits(hurt, calm)
    sizes = [len(workers) for workers in hurt.times.values()]
    assert (sizes[0], sizes[2], sizes[-1]) == (4, 3, 1), hurt.output
    assert list(hurt.times) == list(range(STEPS)), "the next writer tells what the killed one had not written yet"


@pytest.mark.parametrize("at", ["after_backward", "published", "reduced", "committed", "after_step"])
def test_all_but_one_at_the_same_point(at: str, calm: Outcome, tmp_path: Path) -> None:
    """Three of four workers are killed in the same step, at the same point."""
    faults = Faults().kill("w0", step=STEP, at=at).kill("w1", step=STEP, at=at).kill("w3", step=STEP, at=at)
    hurt = run(tmp_path / "run", 4, faults, [*PATIENT, "--max-restarts", "0"])
    assert_same_bits(hurt, calm)
    assert list(hurt.times[STEPS - 1]) == ["w2"]


@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_a_stopped_worker_is_noticed_by_its_silence(exchange: str, calm: Outcome, tmp_path: Path) -> None:
    """SIGSTOP: the process is there, its connections are open, and nothing comes from it."""
    options = [
        "--exchange",
        exchange,
        "--set",
        f"heartbeat-timeout={SILENCE_S}s",
        "--set",
        f"exchange-timeout={10 * WAIT_S}s",
    ]
    faults = Faults().stop("w1", step=STEP, at="after_backward")
    hurt = run(tmp_path / "run", 3, faults, options)
    assert_same_bits(hurt, calm)
    silent = re.search(r"worker w1 .* has been silent for ([0-9.]+) s", hurt.output)
    assert silent is not None, hurt.output
    assert float(silent[1]) >= SILENCE_S


def test_an_error_that_passes_elsewhere(calm: Outcome, tmp_path: Path) -> None:
    """A micro-batch that raises on one worker only makes that worker the suspect, and costs no bit."""
    faults = Faults().fail("w1", step=STEP, at="before_backward")
    hurt = run(tmp_path / "run", 3, faults)
    assert_same_bits(hurt, calm)
    assert "worker w1" in hurt.output
    assert "is suspect: micro-batch" in hurt.output
    assert "another worker tries it" in hurt.output


def test_an_error_that_comes_again(tmp_path: Path) -> None:
    """A micro-batch that raises on two workers is a bug: the run ends and says where, the traceback last and once."""
    faults = Faults().fail("", step=STEP, microbatch=2, at="before_backward")
    hurt = run(tmp_path / "run", 3, faults)
    assert hurt.exit_code == 1
    assert re.search(r"failed at step 3, micro-batch 2 \(samples [0-9, .]+\).*as before on worker w", hurt.output)
    assert hurt.output.count("Traceback (most recent call last)") == 1
    last = hurt.output.strip().splitlines()[-2:]
    assert last[0].startswith("unisono.system.faults.FaultInjected: injected fault at")
    assert re.fullmatch(r"\(in step 3, micro-batch 2, samples [0-9, .]+\)", last[1])
    assert len(hurt.digests) == STEP, "what was done before stays in the journal"
    assert "micro-batch 2" in hurt.lines[-1]["reason"], "and why it ended stands below"
