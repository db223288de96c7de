"""A worker that is lost while gradients are under way changes no bit: every point x rank x workers x exchange.

All points and ranks run with 3 workers over shared memory, and of the others a sample. UNISONO_TEST_ALL=1 runs all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from tests.workers.losses import ended_workers
from unisono.faults import POINTS
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.usefixtures("nursery")

SCRIPT = Path(__file__).with_name("delayed_training.py")
STEPS = 7
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
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--simulate-hosts", "2"]}
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
    """Each point once over shared memory with 3 workers, and a few over the others; each time another rank."""
    chosen = [("shared", 3, at, number % 3, 1 + number % 2) for number, at in enumerate(AT)]
    chosen += [("gloo", 3, at, (number + 1) % 3, 2) for number, at in enumerate(AT[3::4])]
    chosen += [("two-level", 3, at, number % 3, 1) for number, at in enumerate(AT[4::5])]
    return chosen


CASES = list(all_cases()) if os.environ.get("UNISONO_TEST_ALL") else representative()


def run(
    directory: Path,
    workers: int | str,
    faults: Faults | None = None,
    options: Sequence[str] = PATIENT,
    script_args: Sequence[str] = (),
) -> Outcome:
    return run_workers(
        SCRIPT,
        workers,
        directory=directory,
        options=options,
        faults=faults,
        timeout_s=WAIT_S,
        arguments=["--steps", str(STEPS), *script_args],
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """By delay, one worker to which nothing happens."""
    found = {}
    for delay in (1, 2):
        outcome = run(tmp_path_factory.mktemp("calm") / "run", 1, script_args=["--delay", str(delay)])
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
