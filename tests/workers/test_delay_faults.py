"""A worker that is lost while gradients are under way changes no bit: every point x rank x workers x exchange.

The checks run a sample. UNISONO_TEST_ALL=1 runs all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.trainings import Training
from unisono.record import checkpoint_files as files
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

STEPS = 7
run = Training("delayed_training.py", "--steps", STEPS)
STEP = 3
AT = [
    "step_head",
    "before_backward",
    "after_backward",
    "before_combine",
    "published",
    "reduced",
    "committed",
    "after_step",
    *(at for at in POINTS if at.startswith("delay.")),
    "in_recovery",
]
IN_THREAD = ("published", "reduced")
"""Points of the thread that sums, while the script is at any step: counted, and not by the step of the script."""
AFTER_COMPUTING = ("delay.under_way", "delay.waiting", "delay.applied", "after_step")
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--set", "simulate-hosts=2"]}
Case = tuple[str, int, str, int, int]
"""Exchange, number of workers, point, rank, delay."""


def all_cases() -> Iterator[Case]:
    for exchange in EXCHANGES:
        for workers in (2, 3, 4):
            for at in AT:
                for rank in range(workers):
                    for delay in (1, 2):
                        yield exchange, workers, at, rank, delay


def representative() -> list[Case]:
    """Each point that comes with a delay, and some of the others, with 3 workers; each time another rank."""
    chosen = [
        ("shared", 3, at, number % 3, 1 + number % 2)
        for number, at in enumerate(at for at in AT if at.startswith("delay.") or at == "in_recovery")
    ]
    return [
        *chosen,
        ("shared", 3, "reduced", 1, 2),
        ("gloo", 3, "published", 2, 2),
        ("two-level", 3, "committed", 0, 1),
    ]


def some(*cases: Any) -> list[Any]:
    """All cases if they are asked for, else the first."""
    return list(cases) if ALL else [cases[0]]


CASES = list(all_cases()) if ALL else representative()


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """By delay, one worker to which nothing happens."""
    found = {}
    for delay in (1, 2):
        with served_by(standing_nursery):
            outcome = run(tmp_path_factory.mktemp("calm") / "run", 1, arguments=["--delay", str(delay)])
        assert outcome.exit_code == 0, outcome.output
        assert len(set(outcome.digests)) == STEPS
        found[delay] = outcome
    return found


def assert_same_bits(hurt: Outcome, calm: Outcome) -> None:
    assert hurt.exit_code == 0, hurt.output
    assert hurt.digests == calm.digests, hurt.output
    assert hurt.final == calm.final, hurt.output
    assert hurt.evaluations == calm.evaluations, hurt.output
    assert [line["line"] for line in hurt.lines] == list(range(len(calm.lines))), "a line is missing, or there twice"
    totals = [[line["totals"] for line in each.lines if line["kind"] == "step"] for each in (hurt, calm)]
    assert totals[0] == totals[1], hurt.output


@pytest.mark.parametrize(("exchange", "workers", "at", "rank", "delay"), CASES)
def test_a_kill_changes_no_bit(
    exchange: str, workers: int, at: str, rank: int, delay: int, calm: dict[int, Outcome], tmp_path: Path
) -> None:
    """Whoever is killed, wherever it is: the others finish the steps under way, and all that follow."""
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    if at in ("in_recovery", "delay.again"):
        first = (rank + 1) % workers
        faults = Faults().kill(f"w{first}", step=STEP, at="after_backward").kill(f"w{rank}", at=at)
        num_lost = 2
    elif at in IN_THREAD:
        faults, num_lost = Faults().kill(f"w{rank}", at=at, skip=STEP), 1
    else:
        faults, num_lost = Faults().kill(f"w{rank}", step=STEP, at=at), 1
    hurt = run(tmp_path / "run", workers, faults, options, ["--delay", str(delay)])
    assert len(ended_workers(hurt.output)) >= num_lost, f"nobody was killed there:\n{hurt.output}"
    if num_lost == workers:
        assert hurt.exit_code != 0, hurt.output
        return
    assert_same_bits(hurt, calm[delay])


EVALUATES = ["--evaluates", "2", "--delay", "2"]


@pytest.mark.parametrize(
    ("at", "rank"), some(("evaluated", 1), ("in_evaluation", 0), ("in_talk", 2), ("talked", 0), ("delay.applied", 1))
)
def test_a_kill_in_an_evaluation_within_the_loop(at: str, rank: int, tmp_path: Path) -> None:
    """Between two steps, with two gradients under way, nothing can be computed: what is missing comes later."""
    calm = run(tmp_path / "calm", 1, arguments=EVALUATES)
    hurt = run(tmp_path / "run", 3, Faults().kill(f"w{rank}", step=STEP, at=at), PATIENT, EVALUATES)
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert len(calm.evaluations) > 3
    assert_same_bits(hurt, calm)


@pytest.mark.parametrize(("at", "rank"), some(("delay.waiting", 0), ("in_sums", 1), ("in_sums", 0), ("committed", 2)))
def test_a_kill_in_the_first_step(at: str, rank: int, calm: dict[int, Outcome], tmp_path: Path) -> None:
    """Where the names of the sums become known."""
    hurt = run(tmp_path / "run", 3, Faults().kill(f"w{rank}", step=0, at=at), PATIENT, ["--delay", "2"])
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, calm[2])


@pytest.mark.parametrize(
    ("step", "at"), some((STEPS, "delay.waiting"), (STEPS - 1, "after_backward"), (STEPS + 1, "after_step"))
)
def test_a_kill_at_the_end(step: int, at: str, calm: dict[int, Outcome], tmp_path: Path) -> None:
    """In the iterations that have no micro-batches of their own, those that are missing are computed."""
    hurt = run(tmp_path / "run", 3, Faults().kill("w1", step=step, at=at), PATIENT, ["--delay", "2"])
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, calm[2])


@pytest.mark.parametrize(("at", "rank"), some(("delay.applied", 1), ("after_backward", 0), ("after_step", 2)))
def test_a_kill_around_a_break(at: str, rank: int, tmp_path: Path) -> None:
    """A script that leaves the loop drops the gradients that are under way, on all workers."""
    arguments = ["--leave-after", str(STEP), "--delay", "2"]
    calm = run(tmp_path / "calm", 1, arguments=arguments)
    assert len(calm.digests) == STEP + 1 - 2
    hurt = run(tmp_path / "run", 3, Faults().kill(f"w{rank}", step=STEP, at=at), PATIENT, arguments)
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, calm)


@pytest.mark.parametrize(("at", "delay"), some(("after_backward", 2), ("delay.under_way", 1)))
def test_a_newcomer_gets_the_gradients_under_way(at: str, delay: int, calm: dict[int, Outcome], tmp_path: Path) -> None:
    """With a minimum of workers, the others wait for the newcomer at a boundary, with D gradients in the state."""
    hurt = run(tmp_path / "run", "3:3", Faults().kill("w1", step=2, at=at), PATIENT, ["--delay", str(delay)])
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, calm[delay])
    assert "w3" in hurt.times[STEPS - 1], hurt.output


def test_a_newcomer_is_lost_while_it_is_admitted(calm: dict[int, Outcome], tmp_path: Path) -> None:
    faults = Faults().kill("w1", step=2, at="after_backward").kill("w3", at="in_admission")
    hurt = run(tmp_path / "run", "3:3", faults, PATIENT, ["--delay", "2"])
    assert len(ended_workers(hurt.output)) == 2, hurt.output
    assert_same_bits(hurt, calm[2])


LONG = 14


@pytest.fixture(scope="module")
def long(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker to which nothing happens, for longer."""
    with served_by(standing_nursery):
        return run(tmp_path_factory.mktemp("long") / "run", 1, arguments=["--delay", "2", "--steps", str(LONG)])


@pytest.mark.parametrize(
    ("before", "after", "step", "at"),
    some((3, 2, 10, "step_head"), (1, 3, 9, "delay.under_way"), (2, 1, LONG, "delay.applied")),
)
def test_a_run_goes_on_at_another_size(
    before: int, after: int, step: int, at: str, long: Outcome, tmp_path: Path
) -> None:
    """A checkpoint holds the gradients that are under way; here every worker is killed, and the command, too."""
    arguments = ["--delay", "2", "--every", "2", "--steps", str(LONG)]
    killed = run(tmp_path / "run", before, Faults().kill_run("w0", step=step, at=at), PATIENT, arguments)
    assert killed.exit_code != 0
    assert files.complete(tmp_path / "run" / files.FOLDER), killed.output
    resumed = run(tmp_path / "run", after, None, [*PATIENT, "--resume", "auto"], arguments)
    assert resumed.exit_code == 0, resumed.output
    assert f"unisono: 1 of {LONG} steps" not in resumed.output, "it began again"
    assert resumed.digests == long.digests, resumed.output
    assert resumed.final == long.final
    assert resumed.evaluations == long.evaluations


def test_another_delay_is_another_recipe(tmp_path: Path) -> None:
    """A checkpoint with two gradients under way is no beginning of a training that has one."""
    arguments = ["--every", "2", "--steps", str(LONG)]
    faults = Faults().kill_run("w0", step=10, at="after_backward")
    run(tmp_path / "run", 1, faults, PATIENT, [*arguments, "--delay", "2"])
    refused = run(tmp_path / "run", 1, None, [*PATIENT, "--resume", "auto"], [*arguments, "--delay", "1"])
    assert refused.exit_code != 0
    assert "delay" in refused.output


@pytest.mark.parametrize("seed", range(120) if ALL else (7, 45))
def test_two_losses_at_any_points_change_no_bit(seed: int, calm: dict[int, Outcome], tmp_path: Path) -> None:
    """The second while the others make up for the first: whoever has seen a commit sends the result to the others."""
    draw = random.Random(seed)
    exchange, workers, delay = draw.choice(list(EXCHANGES)), draw.choice([3, 4]), draw.choice([1, 2])
    first, second = draw.sample(range(workers), 2)
    faults = Faults().kill(f"w{first}", step=draw.randrange(1, STEPS), at=draw.choice(AFTER_COMPUTING))
    faults = faults.kill(f"w{second}", at=draw.choice(["delay.again", "in_recovery", "delay.waiting", "committed"]))
    hurt = run(
        tmp_path / "run", workers, faults, [*PATIENT, "--exchange", *EXCHANGES[exchange]], ["--delay", str(delay)]
    )
    assert ended_workers(hurt.output), hurt.output
    assert_same_bits(hurt, calm[delay])
