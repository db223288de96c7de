"""One digest for every layout: a model in stages on one process, on groups of several, and whoever is lost where.

Some have layers in shards: ``transformer-1x4`` has one stage and four shards. By default a sample that has each layout,
each exchange, and each point at which a worker can be lost in each part. UNISONO_TEST_ALL runs the product.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.parts import ALL
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import Command, Unisono, forked, marked, served_by, wait_until_gone
from tests.workers.gates import Gates
from tests.workers.journals import canonical
from tests.workers.losses import ended_workers
from tests.workers.test_elastic import join, pid_of
from tests.workers.trainings import Training
from unisono.record import checkpoint_files as files
from unisono.record.journal import compare, times
from unisono.record.rundir import read_facts
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome

pytestmark = [pytest.mark.usefixtures("nursery")]

STEPS = 6
STEP = 3
"""In which workers are lost: an evaluation follows it, and it is the first of an epoch."""
ALONE = [*PATIENT, "--max-restarts", "0"]
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--set", "simulate-hosts=2"]}
KINDS = ["mlp", "skip", "cnn", "transformer", "tied"]
IN_SHARDS = ["mlp-1x2", "cnn-1x2", "transformer-1x4", "transformer-2x2", "tied-2x4"]
train = Training("staged_training.py", "--evaluate", "--clip", "0.5")

STEP_POINTS = ["step_head", "before_backward", "after_backward", "before_combine", "published", "reduced"]
STEP_POINTS += [
    "lanes.prepared",
    "committed",
    "stages.exchange",
    "stages.tied",
    "shard.norms",
    "after_step",
    "in_evaluation",
    "evaluated",
]
CHECKPOINT_POINTS = [
    "checkpoint_copied",
    "checkpoint_part_written",
    "checkpoint_before_manifest",
    "checkpoint_renamed",
    "shard.in_lending",
]

Case = tuple[str, str, str, str, int]
"""Kind of model, layout, exchange, point, number of the worker: what is trained how, and who is killed where."""


def recipe_of(kind: str) -> list[str]:
    """Return the arguments of the script."""
    name, _, cuts = kind.partition("-")
    stages, _, shards = cuts.partition("x")
    return ["--kind", name, *(["--stages", stages, "--shards", shards] if cuts else [])]


def fits(kind: str, layout: str) -> bool:
    """Return whether the processes of a group have stages and shards of their own."""
    _, _, cuts = kind.partition("-")
    stages, shards = (int(number) for number in (cuts or "4x1").split("x"))
    processes = int(layout.partition("x")[2] or 1)
    columns = max(number for number in range(1, stages + 1) if processes % number == 0)
    return shards % (processes // columns) == 0


CALM: list[tuple[str, str, str]] = [
    ("mlp", "1x4", "two-level"),
    ("skip", "1x2", "shared"),
    ("cnn", "1x3", "shared"),
    ("transformer-1x4", "1x4", "gloo"),
    ("tied-2x4", "2", "gloo"),
    ("tied-2x4", "1x4", "two-level"),
    ("tied", "2x3", "two-level"),
]
KILLS: list[Case] = [
    ("mlp", "2x2", "gloo", "lanes.prepared", 0),
    ("cnn", "2x2", "gloo", "before_backward", 3),
    ("transformer-1x4", "2x2", "two-level", "after_backward", 1),
    ("cnn", "3x2", "shared", "published", 4),
    ("transformer", "2x3", "gloo", "reduced", 5),
    ("cnn", "2x3", "shared", "committed", 2),
    ("skip", "2x3", "two-level", "before_backward", 4),
    ("cnn", "2x2", "shared", "in_evaluation", 3),
    ("transformer", "3x2", "two-level", "shard.norms", 2),
    ("tied", "2x2", "gloo", "stages.tied", 3),
    ("tied-2x4", "2x4", "shared", "stages.tied", 0),
    ("cnn-1x2", "2x2", "shared", "stages.exchange", 1),
]
BACKWARD = [
    # the same, and how many exchanges are passed by: a micro-batch of one stage has 9 forward, and 5 back
    ("transformer-1x4", "2x2", "gloo", 10, 2),
    ("transformer-1x4", "2x2", "shared", 9 + 14 + 3, 1),
]
"""Losses in the middle of a backward pass, of the first micro-batch and of one that is added to the first."""
if ALL:  # what the samples below leave out, too
    every = [*KINDS, *IN_SHARDS]
    CALM = [
        case
        for case in itertools.product(every, ["1", "2", "1x2", "1x3", "1x4", "2x2", "3x2", "2x3"], EXCHANGES)
        if fits(*case[:2])
    ]
    KILLS = [
        (kind, layout, exchange, at, number)
        for kind, layout, exchange, at in itertools.product(every, ["2x2", "3x2", "2x3"], EXCHANGES, STEP_POINTS)
        if fits(kind, layout)
        if at != "stages.tied" or kind.startswith("tied")
        if at != "stages.exchange" or kind in ("mlp-1x2", "cnn-1x2", "transformer-1x4")
        for number in range({"2x2": 4, "3x2": 6, "2x3": 6}[layout])
    ]


def sampled(cases: Sequence[tuple[Any, ...]]) -> list[ParameterSet]:
    """The first one is for `make test`, all are for `make test-more`."""
    return [pytest.param(*case, marks=pytest.mark.more if number else ()) for number, case in enumerate(cases)]


def options(exchange: str, others: Sequence[str] = ALONE) -> list[str]:
    """Of a run; others: instead of those of a run in which nobody comes."""
    return [*others, "--exchange", *EXCHANGES[exchange]]


def kills(*who: tuple[int, str]) -> Faults:
    """Losses of workers in one step: the number of each, and its point."""
    faults = Faults()
    for number, at in who:
        faults = faults.kill(f"w{number}", step=STEP, at=at)
    return faults


class Calm:
    """Runs of one worker to which nothing happens, by the arguments of the script; each is made once."""

    def __init__(self, folder: Path, nursery: str) -> None:
        self._folder, self._nursery = folder, nursery
        self._known: dict[tuple[str, ...], tuple[Path, Outcome]] = {}
        self._numbers = itertools.count()

    def __call__(self, *arguments: str, others: Sequence[str] = ()) -> tuple[Path, Outcome]:
        key = (*arguments, *others)
        if key not in self._known:
            directory = self._folder / f"{next(self._numbers)}"
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


@pytest.mark.parametrize(("kind", "layout", "exchange"), sampled(CALM))
def test_every_layout_has_the_bits_of_one_process(
    kind: str, layout: str, exchange: str, calm: Calm, tmp_path: Path
) -> None:
    arguments = recipe_of(kind)
    outcome = train(tmp_path / "run", layout, None, options(exchange), arguments)
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))
    assert set(outcome.generations) == {1}


@pytest.mark.parametrize(("kind", "layout", "exchange", "at", "number"), sampled(KILLS))
def test_a_kill_in_a_step_changes_no_bit(
    kind: str, layout: str, exchange: str, at: str, number: int, calm: Calm, tmp_path: Path
) -> None:
    arguments = recipe_of(kind)
    faults = Faults().kill(f"w{number}", step=STEP, at=at)
    outcome = train(tmp_path / "run", layout, faults, options(exchange), arguments)
    assert f"w{number}" in ended_workers(outcome.output), outcome.output
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))
    assert max(outcome.generations) > 1


@pytest.mark.more
@pytest.mark.parametrize(("kind", "layout", "exchange", "passed", "number"), BACKWARD)
def test_a_kill_within_a_backward_pass_changes_no_bit(
    kind: str, layout: str, exchange: str, passed: int, number: int, calm: Calm, tmp_path: Path
) -> None:
    """Some gradients of a micro-batch are added to the sums by then: these sums are computed again."""
    arguments = recipe_of(kind)
    faults = Faults().kill(f"w{number}", step=STEP, at="stages.exchange", skip=passed)
    outcome = train(tmp_path / "run", layout, faults, options(exchange), arguments)
    assert f"w{number}" in ended_workers(outcome.output), outcome.output
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))


# -- more than one loss ------------------------------------------------------------------------------

BESIDE: list[tuple[str, str, str, Faults]] = [
    # what; layout; exchange; who is lost
    ("one of each group: the others form one", "2x2", "shared", kills((0, "before_backward"), (3, "before_backward"))),
    ("one of each group, one after the other", "2x2", "gloo", kills((1, "after_backward"), (2, "in_recovery"))),
    ("the same part twice", "3x2", "gloo", kills((1, "before_combine"), (3, "lanes.prepared"))),
    ("a whole group", "2x2", "gloo", kills((2, "before_combine"), (3, "before_combine"))),
    (
        "a whole group of three, one by one",
        "2x3",
        "shared",
        kills((0, "reduced"), (1, "in_recovery"), (2, "after_step")),
    ),
    ("one who knows the sums of a step", "3x2", "gloo", Faults().kill("w1", step=0, at="in_sums")),
]


if not ALL:
    BESIDE = BESIDE[::2]


@pytest.mark.more
@pytest.mark.parametrize(("layout", "exchange", "faults"), [one[1:] for one in BESIDE], ids=[one[0] for one in BESIDE])
def test_several_losses_change_no_bit(layout: str, exchange: str, faults: Faults, calm: Calm, tmp_path: Path) -> None:
    arguments = ["--kind", "transformer"]
    outcome = train(tmp_path / "run", layout, faults, options(exchange), arguments)
    assert {fault.worker for fault in faults.faults} <= ended_workers(outcome.output), outcome.output
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))


@pytest.mark.more
def test_a_part_that_is_lost_wholly_ends_the_run(tmp_path: Path) -> None:
    """Without restarts; it says which part, and nobody waits."""
    faults = kills((1, "after_backward"), (3, "in_recovery"))
    outcome = train(tmp_path / "run", "2x2", faults, ALONE, ["--kind", "mlp"])
    assert outcome.exit_code not in (0, None), outcome.output
    assert "no worker with the run's state of part 1 of the model is left" in outcome.output, outcome.output
    assert len(outcome.digests) in (STEP, STEP + 1)


# -- recipes -----------------------------------------------------------------------------------------

RECIPES: list[tuple[list[str], list[str], str, str, int]] = [
    # arguments of the script; options of the run; layout; point, number of the worker who is lost there
    (["--optimizer", "momentum"], [], "2x2", "after_backward", 1),
    (["--optimizer", "rmsprop"], [], "2x2", "lanes.prepared", 2),
    (["--optimizer", "adagrad", "--kind", "rare"], [], "2x3", "committed", 4),
    (["--wire", "bf16", "--kind", "cnn"], ["--exchange", *EXCHANGES["gloo"]], "2x2", "published", 3),
    (["--wire", "bf16", "--kind", "transformer"], ["--exchange", *EXCHANGES["two-level"]], "2x3", "after_backward", 0),
    (["--weighted"], [], "2x2", "before_combine", 0),
    (["--frozen", "0", "5"], [], "2x2", "reduced", 3),
    (["--frozen", "3", "--kind", "mlp"], [], "2x3", "before_backward", 1),
    (["--kind", "rare"], [], "2x2", "after_step", 1),
    (["--passes", "2", "--kind", "cnn"], [], "2x2", "before_combine", 2),
    (["--microbatches", "1"], [], "2x2", "after_backward", 0),
    (["--microbatches", "2", "--stages", "3", "--kind", "cnn"], [], "3x3", "committed", 7),
]


if not ALL:
    RECIPES = RECIPES[::2]


@pytest.mark.more
@pytest.mark.parametrize(
    ("arguments", "more", "layout", "at", "number"), RECIPES, ids=[" ".join(recipe[0]) for recipe in RECIPES]
)
def test_a_kill_changes_no_bit_of_any_recipe(
    arguments: list[str], more: list[str], layout: str, at: str, number: int, calm: Calm, tmp_path: Path
) -> None:
    faults = Faults().kill(f"w{number}", step=STEP, at=at)
    outcome = train(tmp_path / "run", layout, faults, [*ALONE, *more], arguments)
    assert f"w{number}" in ended_workers(outcome.output), outcome.output
    assert_same_bits(tmp_path / "run", outcome, calm(*arguments))


@pytest.mark.more
@pytest.mark.parametrize("layout", ["2x2", "1x4"])
def test_samples_that_are_left_out(layout: str, calm: Calm, tmp_path: Path) -> None:
    """Some micro-batches lose samples, and some all of them, which no part computes."""
    without = tmp_path / "without"
    without.write_text("0-39\n60\n")
    more = ["--set", f"without={without}"]
    outcome = train(tmp_path / "run", layout, None, [*ALONE, *more], ["--kind", "cnn"])
    expected = calm("--kind", "cnn", others=more)
    assert_same_bits(tmp_path / "run", outcome, expected)
    assert outcome.digests != calm("--kind", "cnn")[1].digests


# -- checkpoints -------------------------------------------------------------------------------------

RESUMED: list[tuple[str, str, list[str]]] = [
    ("2x2", "1", ["--kind", "cnn"]),
    ("1", "1x4", ["--kind", "transformer"]),
    ("1x4", "2x2", [*recipe_of("tied-2x4"), "--optimizer", "adagrad"]),
    ("1x4", "1x2", ["--kind", "transformer"]),
    ("2", "2x2", ["--kind", "skip", "--optimizer", "momentum"]),
]
CHECKPOINT_KILLS = [*zip(CHECKPOINT_POINTS[:4], (2, 3, 0, 0), strict=True)]
if ALL:
    layouts = ["1", "2", "1x2", "1x3", "1x4", "2x2", "3x2", "2x3"]
    kinds = ("skip", "transformer", "tied-2x4", "transformer-1x4")
    RESUMED = [
        (*pair, recipe_of(kind))
        for pair in itertools.permutations(layouts, 2)
        for kind in kinds
        if all(fits(kind, layout) for layout in pair)
    ]
else:
    RESUMED, CHECKPOINT_KILLS = RESUMED[:3], CHECKPOINT_KILLS[::2]


@pytest.mark.more
@pytest.mark.parametrize(("before", "after", "recipe"), RESUMED)
def test_a_run_goes_on_in_another_layout(
    before: str, after: str, recipe: list[str], calm: Calm, tmp_path: Path, mark: str
) -> None:
    """All of its processes are killed at once, when two checkpoints are whole: these are of the other layout."""
    directory, arguments = tmp_path / "run", [*recipe, "--checkpoint-every", "1"]
    faults = Faults().kill_run("w0", at="checkpoint_renamed", skip=1)
    killed = train(directory, before, faults, PATIENT, arguments)
    assert killed.exit_code == -signal.SIGKILL, killed.output
    wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)
    for path in files.complete(directory / files.FOLDER):
        files.verify(path)
    assert files.complete(directory / files.FOLDER)
    outcome = train(directory, after, None, [*PATIENT, "--resume", str(directory)], arguments)
    assert len(read_facts(directory)["resumed"]) == 1
    assert_same_bits(directory, outcome, calm(*recipe))


@pytest.mark.more
@pytest.mark.parametrize(("at", "number"), CHECKPOINT_KILLS)
def test_a_kill_in_a_checkpoint_changes_no_bit(at: str, number: int, calm: Calm, tmp_path: Path) -> None:
    directory, arguments = tmp_path / "run", ["--kind", "cnn"]
    faults = Faults().kill(f"w{number}", at=at)
    outcome = train(directory, "2x2", faults, ALONE, [*arguments, "--checkpoint-every", "1"])
    assert f"w{number}" in ended_workers(outcome.output), outcome.output
    assert_same_bits(directory, outcome, calm(*arguments))
    complete = files.complete(directory / files.FOLDER)
    assert complete
    for path in complete:
        files.verify(path)


# -- workers that come and go ------------------------------------------------------------------------

MANY = 24
EVERYTHING = ["--kind", "transformer", "--steps", str(MANY), "--unbalanced"]


def start(unisono: Unisono, run_dir: Path, gates: Gates, layout: str, *options: object) -> Command:
    arguments = [*train.arguments, *EVERYTHING, "--gates", gates.folder]
    return unisono("run", train.path, "--workers", layout, "--run-dir", run_dir, *options, "--", *arguments)


def finish(command: Command, run_dir: Path, calm: Calm) -> list[list[str]]:
    """Returns which workers computed something in each step."""
    assert command.wait() == 0, command.err
    expected, _ = calm(*EVERYTHING)
    assert compare(expected, run_dir).startswith(f"identical: {MANY} steps")
    assert canonical(expected) == canonical(run_dir)
    return [
        [worker for worker, known in sorted(workers.items()) if known["leaves"]]
        for workers in times.by_step(run_dir).values()
    ]


@pytest.mark.more
def test_groups_come_and_go(unisono: Unisono, calm: Calm, tmp_path: Path) -> None:
    """`unisono scale` makes one group two, and takes the second one away again. Evaluators have nothing to do there."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (3, 8, 14)) as gates:
        command = start(unisono, run_dir, gates, "1x2")
        gates.wait(3)
        guest = unisono("evaluate", run_dir)
        assert guest.wait() == 2, guest.err
        assert "has groups of 2 processes" in "\n".join(guest.err)
        grow = unisono("scale", run_dir, 2)
        assert grow.wait() == 0, grow.err
        gates.open(3, command.generation("; generation 2 with"))
        gates.open(8, command.generation("with 4 workers"))
        gates.wait(14)
        shrink = unisono("scale", run_dir, 1)
        assert shrink.wait() == 0, shrink.err
        gates.open(14, command.generation("w2 and w3 leave"))
        computing = finish(command, run_dir, calm)
    assert computing[3] == ["w0", "w1"]
    assert computing[14] == ["w0", "w1", "w2", "w3"]
    assert computing[-1] == ["w0", "w1"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("exchange", "also", "expected"),
    [("shared", "w4", "w5"), ("gloo", "", "w4"), ("gloo", "w2", "w4")],
    ids=["and is lost as well", "over a network", "and one of the other group is lost"],
)
def test_a_replacement_takes_the_part_of_a_lost_worker(
    exchange: str,
    also: str,
    expected: str,
    unisono: Unisono,
    calm: Calm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It completes the group, which computes again. Then another one is lost, perhaps, while it gets the state."""
    run_dir, faults = tmp_path / "run", Faults().kill("w1", step=STEP, at="after_backward")
    if also:
        faults = faults.kill(also, at="in_admission")
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (5, 9)) as gates:
        command = start(unisono, run_dir, gates, "2x2", "--exchange", exchange)
        gates.open(5, command.generation("with 4 workers", after="with 3 workers"))
        gates.open(9, command.generation("with 4 workers", after=rf"{also or 'w1'} .*(killed|closed)"))
        computing = finish(command, run_dir, calm)
    assert expected in computing[-1]
    assert len(computing[-1]) == 4


@pytest.mark.more
def test_a_machine_that_joins_carries_the_model_on(unisono: Unisono, calm: Calm, tmp_path: Path) -> None:
    """Its two workers are a group; then the first group is killed, and its state is theirs."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (3, 8)) as gates:
        command = start(unisono, run_dir, gates, "1x2", "--max-restarts", 0)
        gates.wait(3)
        join(unisono, run_dir, 2)
        gates.open(3, command.generation("; generation 2 with"))
        command.generation("with 4 workers")
        gates.wait(8, workers=4)
        for number in (0, 1):
            os.kill(pid_of(f"w{number}", run_dir), signal.SIGKILL)
        gates.open(8, command.generation("with 2 workers", after="with 4 workers"))
        computing = finish(command, run_dir, calm)
    assert computing[7] == ["w0", "w1", "w2", "w3"]
    assert computing[-1] == ["w2", "w3"]
