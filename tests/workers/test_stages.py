"""One digest for every layout: a model in stages on one process, on groups of several, and whoever is lost where.

By default a sample that has each layout, each exchange, and each point at which a worker can be lost in each part.
UNISONO_TEST_ALL runs the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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

pytestmark = [pytest.mark.usefixtures("nursery")]

STEPS = 6
STEP = 3
"""In which workers are lost: an evaluation follows it, and it is the first of an epoch."""
ALONE = [*PATIENT, "--max-restarts", "0"]
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--set", "simulate-hosts=2"]}
KINDS = ["mlp", "skip", "cnn", "transformer"]
train = Training("staged_training.py", "--evaluate", "--clip", "0.5")

STEP_POINTS = ["step_head", "before_backward", "after_backward", "before_combine", "published", "reduced"]
STEP_POINTS += ["lanes.prepared", "committed", "shard.norms", "after_step", "in_evaluation", "evaluated"]
CHECKPOINT_POINTS = [
    "checkpoint_copied",
    "checkpoint_part_written",
    "checkpoint_before_manifest",
    "checkpoint_renamed",
    "shard.in_lending",
]

Case = tuple[str, str, str, str, int]
"""Kind of model, layout, exchange, point, number of the worker: what is trained how, and who is killed where."""

CALM: list[tuple[str, str, str]] = [
    ("mlp", "1x4", "two-level"),
    ("skip", "1x2", "shared"),
    ("cnn", "1x3", "shared"),
    ("transformer", "1x4", "gloo"),
    ("cnn", "2", "gloo"),
    ("transformer", "2x3", "two-level"),
]
KILLS: list[Case] = [
    ("mlp", "2x2", "shared", "step_head", 0),
    ("cnn", "2x2", "gloo", "before_backward", 3),
    ("transformer", "2x2", "two-level", "after_backward", 1),
    ("skip", "2x2", "shared", "before_combine", 2),
    ("cnn", "3x2", "shared", "published", 4),
    ("transformer", "2x3", "gloo", "reduced", 5),
    ("mlp", "2x2", "gloo", "lanes.prepared", 0),
    ("skip", "3x2", "two-level", "lanes.prepared", 3),
    ("cnn", "2x3", "shared", "committed", 2),
    ("mlp", "3x2", "gloo", "after_step", 5),
    ("skip", "2x3", "two-level", "before_backward", 4),
    ("cnn", "2x2", "shared", "in_evaluation", 3),
    ("mlp", "2x3", "shared", "evaluated", 1),
    ("transformer", "3x2", "two-level", "shard.norms", 2),
    ("skip", "2", "shared", "after_backward", 1),
    ("mlp", "2", "gloo", "committed", 0),
]
if ALL:
    CALM = list(itertools.product(KINDS, ["1", "2", "1x2", "1x3", "1x4", "2x2", "3x2", "2x3"], EXCHANGES))
    KILLS = [
        (kind, layout, exchange, at, number)
        for kind, layout, exchange, at in itertools.product(KINDS, ["2x2", "3x2", "2x3"], EXCHANGES, STEP_POINTS)
        for number in range({"2x2": 4, "3x2": 6, "2x3": 6}[layout])
    ]


def options(exchange: str, others: Sequence[str] = ALONE) -> list[str]:
    return [*others, "--exchange", *EXCHANGES[exchange]]


class Calm:
    """Runs of one worker to which nothing happens, by the arguments of the script; each is made once."""

    def __init__(self, folder: Path, nursery: str) -> None:
        self._folder, self._nursery = folder, nursery
        self._known: dict[tuple[str, ...], tuple[Path, Outcome]] = {}

    def __call__(self, *arguments: str, others: Sequence[str] = ()) -> tuple[Path, Outcome]:
        key = (*arguments, *others)
        if key not in self._known:
            directory = self._folder / f"{len(self._known)}"
            with served_by(self._nursery):
                outcome = train(directory, 1, options=[*PATIENT, *others], arguments=arguments)
            assert outcome.exit_code == 0, outcome.output
            assert len(set(outcome.digests)) == len(outcome.digests) >= STEPS
            self._known[key] = directory, outcome
        return self._known[key]


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return Calm(tmp_path_factory.mktemp("calm"), standing_nursery)


def assert_same_bits(directory: Path, found: Outcome, expected: tuple[Path, Outcome]) -> None:
    assert found.exit_code == 0, found.output
    assert found.digests == expected[1].digests, found.output
    assert found.final == expected[1].final, found.output
    assert found.evaluations == expected[1].evaluations, found.output
    assert compare(expected[0], directory).startswith("identical: ")


def test_the_points_are_those_that_there_are() -> None:
    others = ("shard.", "delay.", "local.", "states.", "deliver.", "evaluation.")
    known = {*STEP_POINTS, *CHECKPOINT_POINTS, "in_sums", "in_recovery", "in_talk", "talked", "in_admission"}
    assert {at for at in POINTS if not at.startswith(others)} - known == set()


@pytest.mark.more
@pytest.mark.parametrize(("kind", "layout", "exchange"), CALM)
def test_every_layout_has_the_bits_of_one_process(
    kind: str, layout: str, exchange: str, calm: Calm, tmp_path: Path
) -> None:
    arguments = ["--kind", kind]
    outcome = train(tmp_path / "run", layout, None, options(exchange), arguments)
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))
    assert set(outcome.generations) == {1}


@pytest.mark.more
@pytest.mark.parametrize(("kind", "layout", "exchange", "at", "number"), KILLS)
def test_a_kill_in_a_step_changes_no_bit(
    kind: str, layout: str, exchange: str, at: str, number: int, calm: Calm, tmp_path: Path
) -> None:
    arguments = ["--kind", kind]
    faults = Faults().kill(f"w{number}", step=STEP, at=at)
    outcome = train(tmp_path / "run", layout, faults, options(exchange), arguments)
    assert f"w{number}" in ended_workers(outcome.output), outcome.output
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))
    assert max(outcome.generations) > 1
