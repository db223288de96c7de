"""Uneven workers get uneven shares, and help each other, with the same bits; and their time is accounted for."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.uneven_training import NUM_LEAVES
from unisono.core.events import Seconds
from unisono.record.journal import Line, compare
from unisono.testing import Faults, Outcome, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("uneven_training.py")
LATE = 10
"""The step in which a worker is late; by then all paces are known, and nothing is computed twice to compare it."""
EACH = ["--each-s", "0.03"]
"""How long a micro-batch takes: much longer than what a busy machine adds to it."""
EXTRA = ["--extra-s", "0.09"]
"""A slow worker takes four times as long."""
MEASURED = [*EXTRA, "--own-clock"]
"""... by a clock that only that moves, so that the paces are exactly these."""
SLOW = "takes 4.0x as long as the others for a micro-batch: it now gets"
SHARED = ["--exchange", "shared"]
TWO_LEVEL = ["--exchange", "two-level", "--set", "simulate-hosts=2"]

Start = Callable[..., Outcome]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def run(
        name: str,
        workers: int,
        *arguments: str,
        faults: Faults | None = None,
        options: Sequence[str] = SHARED,
    ) -> Outcome:
        outcome = run_workers(
            SCRIPT,
            workers,
            directory=tmp_path / name,
            arguments=[*EACH, *arguments],
            options=[*PATIENT, *options],
            faults=faults,
            timeout_s=WAIT_S,
        )
        assert outcome.exit_code == 0, outcome.output
        return outcome

    return run


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker to which nothing happens."""
    with served_by(standing_nursery):
        return run_workers(SCRIPT, 1, directory=tmp_path_factory.mktemp("calm") / "run", timeout_s=WAIT_S)


def steps(outcome: Outcome) -> list[Line]:
    return [line for line in outcome.lines if line["kind"] == "step"]


def leaves(outcome: Outcome, step: int, worker: str) -> int:
    return int(outcome.times[step][worker]["leaves"] or 0)


def said(outcome: Outcome) -> list[str]:
    """What was said about the shares."""
    return [line["balance"] for line in steps(outcome) if "balance" in line]


def late() -> Faults:
    return Faults().delay("w1", 1.0, step=LATE, at="before_backward")


@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_a_slow_worker_gets_less_and_is_named(exchange: str, calm: Outcome, start: Start, tmp_path: Path) -> None:
    hurt = start("slow", 2, *MEASURED, options=["--exchange", exchange])
    assert hurt.digests == calm.digests
    assert hurt.final == calm.final
    assert said(hurt) == [f"w1 {SLOW} 1 of {NUM_LEAVES}"]
    assert said(hurt)[0] in hurt.output
    assert leaves(hurt, 0, "w1") == NUM_LEAVES // 2, "nothing is known at first"
    if exchange == "gloo":  # where nobody sees the others' work, and helps
        assert (leaves(hurt, 15, "w0"), leaves(hurt, 15, "w1")) == (NUM_LEAVES - 1, 1)
    assert compare(tmp_path / "slow", tmp_path / "slow").startswith("identical: 16 steps"), "it knows these lines"


@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_a_worker_that_is_fast_again_is_given_its_share_back(exchange: str, calm: Outcome, start: Start) -> None:
    hurt = start("changing", 2, *MEASURED, "--until-step", "9", options=["--exchange", exchange])
    assert hurt.digests == calm.digests
    assert said(hurt) == [f"w1 {SLOW} 1 of {NUM_LEAVES}"]  # and so soon after that nothing more
    if exchange == "gloo":
        assert (leaves(hurt, 8, "w1"), leaves(hurt, max(hurt.times), "w1")) == (1, NUM_LEAVES // 2)


@pytest.mark.parametrize(("options", "workers"), [(SHARED, 2), (TWO_LEVEL, 4)], ids=["shared", "two-level"])
def test_members_that_are_done_compute_what_a_late_one_has_not_started(
    options: list[str], workers: int, calm: Outcome, start: Start, tmp_path: Path
) -> None:
    """It stays in its first micro-batch until they have; without help it would stay there for ever."""
    pipe = tmp_path / "computed"
    os.mkfifo(pipe)
    held = ["--helped", str(pipe), "--helped-step", str(LATE)]
    hurt = start("late", workers, *MEASURED, "--slow", "0", *held, options=options)
    assert hurt.digests == calm.digests
    (slow,) = said(hurt)
    share = re.search(rf"w0 {SLOW} (\d) of {NUM_LEAVES}", slow)
    assert share is not None, slow
    assert sum(leaves(hurt, LATE, worker) for worker in hurt.times[LATE]) == NUM_LEAVES
    assert leaves(hurt, LATE, "w1") == 1
    assert leaves(hurt, LATE, "w0") > int(share[1]), "on its host, only the late one has had more than it computed"


@pytest.mark.parametrize("at", ["before_combine", "published", "reduced", "committed"])
@pytest.mark.parametrize("killed", ["w0", "w1"])
def test_a_helper_or_the_late_one_may_die(killed: str, at: str, calm: Outcome, start: Start) -> None:
    """The one has left leaves out that the other has computed; what dies with either is computed again."""
    hurt = start("killed", 2, faults=late().kill(killed, step=LATE, at=at))
    assert ended_workers(hurt.output)
    assert hurt.digests == calm.digests
    assert hurt.final == calm.final


def test_a_kill_among_uneven_workers_changes_no_bit(calm: Outcome, start: Start) -> None:
    faults = Faults().kill("w2", step=7, at="after_backward").kill("w0", step=11, at="published")
    hurt = start("killed", 3, *EXTRA, faults=faults)
    assert len(ended_workers(hurt.output)) >= 2
    assert hurt.digests == calm.digests
    assert hurt.final == calm.final


def test_balance_can_be_turned_off(calm: Outcome, start: Start) -> None:
    """Everybody computes as many micro-batches, however slow, and nobody helps."""
    hurt = start("unbalanced", 2, *EXTRA, "--unbalanced", faults=late())
    assert hurt.digests == calm.digests
    assert {leaves(hurt, step, worker) for step in hurt.times for worker in ("w0", "w1")} == {NUM_LEAVES // 2}
    assert not any("balance" in line for line in steps(hurt))


@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_the_parts_of_a_step_are_all_of_it(exchange: str, start: Start, tmp_path: Path) -> None:
    """Of each step by every worker's own clock, to 2%; and who waits for a slow one says so.

    But for steps in which the process was interrupted between two clocks: so, of most, and of some with an evaluation.
    """
    hurt = start(
        "parts",
        2,
        *EXTRA,
        "--unbalanced",
        "--evaluate",
        "--walls",
        str(tmp_path),
        options=["--exchange", exchange],
    )
    *known, _ = hurt.times.values()  # what the last step's parts were is told to nobody
    for worker in ("w0", "w1"):
        wall = json.loads((tmp_path / worker).read_text())
        told = [sum(step[worker][part] or 0.0 for part in Seconds.__struct_fields__) for step in known]
        off = [parts / seconds - 1 for parts, seconds in zip(told, wall, strict=False)][1:]
        assert sum(told[1:]) <= sum(wall[1:-1]) * 1.02, "more than there was"
        assert abs(statistics.median(off)) <= 0.02, off
        assert min(map(abs, off[2::4])) <= 0.02, f"of the steps that end with an evaluation: {off[2::4]}"
    # In most steps: in some, the slow one may have waited for the other's turn on a core.
    waiting = [[step[worker]["waiting"] or 0.0 for step in known[1:]] for worker in ("w0", "w1")]
    assert statistics.median(waiting[0]) > statistics.median(waiting[1])
