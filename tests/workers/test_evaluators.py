"""Evaluation beside the training: the same totals, whoever computes them, and workers that train on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

from tests.parts import ALL
from tests.workers.conftest import Command, Unisono, served_by
from tests.workers.evaluated_training import EVALUATORS
from tests.workers.gates import Gates
from tests.workers.models import Cnn, Images, bits_of
from tests.workers.processes import Seat
from tests.workers.static_team import Place, train_on
from unisono import cli
from unisono.record import checkpoint_files as files
from unisono.record.journal import compare
from unisono.system.faults import ENVIRONMENT, encode
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("evaluated_training.py")
STEPS, LOOPS = 8, 2


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _totals(seat: Seat, place: Place, wait: bool, asks: bool) -> dict[str, Any]:
    """Train three steps, evaluate after each, and ask for the result a step later."""
    found = []
    with place.run(seed=5) as run:
        model = Cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def count(batch: Any) -> dict[str, Any]:
            x, y = batch
            scores = model(x)
            return {"right": (scores.argmax(1) == y).sum(), "loss": F.cross_entropy(scores, y, reduction="sum")}

        for step in run.steps(Images(), batch_size=8, microbatches=4, max_steps=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if asks:
                found += [evaluation.result() for evaluation in run.pending_evaluations]
            if wait:
                found.append(run.evaluate(Images(), count, batch_size=5))
            else:
                run.evaluate(Images(), count, batch_size=5, wait=False)
                assert run.pending_evaluations[-1].step == step.number
        if asks:
            found += [evaluation.result() for evaluation in run.pending_evaluations]
            assert run.pending_evaluations == []
        drawn = torch.rand(3)
    return {"totals": bits_of(found), "model": bits_of(model.state_dict()), "drawn": bits_of(drawn)}


@pytest.mark.parametrize("size", [1, 3])
def test_without_an_evaluator_the_members_compute_it_at_once(size: int) -> None:
    (first,) = train_on("shared", 1, _totals, True, True)
    by_rank = train_on("shared", size, _totals, False, True)
    assert {each["totals"] for each in by_rank} == {first["totals"]}
    assert {each["model"] for each in by_rank} == {first["model"]}
    assert len({each["drawn"] for each in by_rank}) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("run", SCRIPT, "--evaluators", "-1"), "--evaluators must be 0 or more, got --evaluators -1"),
        (("evaluate", "."), "it has no run.json"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[object, ...], why: str) -> None:
    outcome = CliRunner().invoke(cli._group, [*map(str, words)], standalone_mode=False)
    assert why in f"{outcome.exception} {outcome.output}"


# -- with evaluators ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of one worker without evaluators, by how many steps later they ask for results (0: never)."""
    found = {}
    with served_by(standing_nursery):
        for later in (0, 2):
            found[later] = tmp_path_factory.mktemp("alone") / "run"
            outcome = run_workers(SCRIPT, 1, directory=found[later], arguments=arguments(later))
            assert outcome.exit_code == 0, outcome.output
            assert len(outcome.evaluations) == 4
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def arguments(later: int = 2) -> list[str]:
    return ["--steps", str(STEPS), "--loops", str(LOOPS), "--later", str(later)]


def check(outcome: Outcome, run_dir: Path, alone: Path) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert compare(alone, run_dir).startswith(f"identical: {STEPS * LOOPS} steps")


def start(unisono: Unisono, run_dir: Path, gates: Gates, *options: object, later: int = 2) -> Command:
    return unisono(
        "run", SCRIPT, "--run-dir", run_dir, *options, "--", *arguments(later), "--gates", gates.folder, "--save"
    )


def finish(command: Command, run_dir: Path, alone: Path) -> None:
    assert command.wait() == 0, command.err
    assert compare(alone, run_dir).startswith(f"identical: {STEPS * LOOPS} steps")


def saved(run_dir: Path) -> list[int]:
    return [files.step_of(path) for path in files.complete(run_dir / files.FOLDER)]


EVALUATES = "evaluating for the run in"


def killed_evaluator(run_dir: Path) -> None:
    """Kill the evaluator that has taken the oldest snapshot."""
    (claim, *_) = sorted((run_dir / "evaluations").glob("*/claim"))
    os.kill(int(claim.read_text().split()[1]), signal.SIGKILL)


@pytest.mark.usefixtures("nursery")
def test_the_members_train_on_and_checkpoints_wait(
    unisono: Unisono, run_dir: Path, tmp_path: Path, alone: dict[int, Path]
) -> None:
    """A checkpoint without the totals could not be gone on from: the models of that step are over by then."""
    with Gates(tmp_path / "gates", (0, 7, EVALUATORS)) as gates:
        command = start(unisono, run_dir, gates, "--workers", 2, "--evaluators", 1, later=0)
        command.line(EVALUATES)
        gates.open(0)
        gates.wait(EVALUATORS)
        gates.wait(7, workers=2)  # with two evaluations under way
        assert saved(run_dir) == []
        gates.open(EVALUATORS)
        gates.open(7)
        finish(command, run_dir, alone[0])
    assert saved(run_dir)[-1] == STEPS * LOOPS
    assert not [*(run_dir / "evaluations").glob("[0-9]*")]


@pytest.mark.usefixtures("nursery")
def test_a_newcomer_comes_when_the_totals_are_known_and_asks_for_them_as_all_others(
    unisono: Unisono, run_dir: Path, tmp_path: Path, alone: dict[int, Path]
) -> None:
    with Gates(tmp_path / "gates", (0, 2, 3, EVALUATORS)) as gates:
        command = start(unisono, run_dir, gates, "--workers", 1, "--evaluators", 1)
        command.line(EVALUATES)
        gates.open(0)
        gates.wait(2)
        gates.wait(EVALUATORS)
        unisono("scale", run_dir, 2).wait()
        gates.open(2, command.generation("w1 joins"))
        gates.open(EVALUATORS)
        gates.open(3)
        finish(command, run_dir, alone[2])


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("number", [1, 2])
def test_a_snapshot_of_a_killed_evaluator_is_evaluated_by_another_or_by_the_workers(
    number: int, unisono: Unisono, run_dir: Path, tmp_path: Path, alone: dict[int, Path]
) -> None:
    with Gates(tmp_path / "gates", (0, 3, EVALUATORS)) as gates:
        command = start(unisono, run_dir, gates, "--workers", 2, "--evaluators", number)
        for evaluator in range(number):
            command.line(EVALUATES, pattern=rf"e{evaluator}\b")
        gates.open(0)
        gates.wait(EVALUATORS)
        gates.wait(3, workers=2)
        killed_evaluator(run_dir)
        command.line("was killed, and is being restarted")
        gates.open(EVALUATORS)
        gates.open(3)
        finish(command, run_dir, alone[2])


@pytest.mark.usefixtures("nursery")
def test_what_an_evaluator_cannot_compute_the_workers_compute(
    unisono: Unisono, run_dir: Path, tmp_path: Path, alone: dict[int, Path]
) -> None:
    with Gates(tmp_path / "gates", (0,)) as gates:
        wanted = ["--gates", gates.folder, "--save", "--broken"]
        command = unisono(
            "run", SCRIPT, "--run-dir", run_dir, "--workers", 2, "--evaluators", 1, "--", *arguments(), *wanted
        )
        command.line(EVALUATES)
        gates.open(0)
        finish(command, run_dir, alone[2])
    command.line("the workers compute the evaluation of step 1: the script of an evaluator ended with exit code 1")


@pytest.mark.usefixtures("nursery")
def test_an_evaluator_that_was_started_by_hand_leaves_and_holds_nobody_back(
    unisono: Unisono, run_dir: Path, tmp_path: Path
) -> None:
    """The script asks for nothing for a long time; the members compute it at the next step, and let the newcomer in."""
    rare = ["--every", "1000"]
    baseline = run_workers(SCRIPT, 1, directory=tmp_path / "one", arguments=[*arguments(0), *rare])
    assert baseline.exit_code == 0, baseline.output
    with Gates(tmp_path / "gates", (0, 5, EVALUATORS)) as gates:
        wanted = ["--gates", gates.folder, "--save", *rare, "--seen-at", 3]
        command = unisono("run", SCRIPT, "--run-dir", run_dir, "--workers", 1, "--", *arguments(0), *wanted)
        gates.wait(0)
        guest = unisono("evaluate", run_dir)
        guest.line(EVALUATES)
        gates.open(0)
        gates.wait(EVALUATORS)
        guest.process.send_signal(signal.SIGINT)
        assert guest.wait() == 130, guest.err
        command.line("the workers compute the evaluation of step 1: there is no evaluator any longer")
        gates.wait(5)
        unisono("scale", run_dir, 2).wait()
        gates.open(5, command.generation("w1 joins"))
        gates.open(EVALUATORS)
        finish(command, run_dir, tmp_path / "one")


def test_a_script_that_runs_alone_has_evaluators(
    unisono: Unisono, run_dir: Path, tmp_path: Path, mark: str, alone: dict[int, Path]
) -> None:
    with Gates(tmp_path / "gates", (0, EVALUATORS)) as gates:
        words = [sys.executable, SCRIPT, *arguments(), "--gates", gates.folder, "--directory", run_dir]
        training = Command([*map(str, words)], tmp_path, mark)
        try:
            gates.wait(0)
            guest = unisono("evaluate", run_dir)
            guest.line(EVALUATES)
            gates.open(0)
            gates.wait(EVALUATORS)
            gates.open(EVALUATORS)
            finish(training, run_dir, alone[2])
            assert guest.wait() == 0, guest.err
        finally:
            training.end()


@pytest.mark.usefixtures("nursery")
def test_a_script_that_has_changed_is_refused(
    unisono: Unisono, run_dir: Path, tmp_path: Path, alone: dict[int, Path]
) -> None:
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.read_text() + "\n# changed\n")
    with Gates(tmp_path / "gates", (0,)) as gates:
        command = start(unisono, run_dir, gates, "--workers", 1)
        gates.wait(0)
        guest = unisono("evaluate", run_dir, other)
        assert guest.wait() == 2
        guest.line("is not the one that the run started with")
        gates.open(0)
        finish(command, run_dir, alone[2])


@pytest.mark.usefixtures("nursery")
def test_a_run_that_was_stopped_goes_on_with_the_totals(
    unisono: Unisono, run_dir: Path, tmp_path: Path, alone: dict[int, Path]
) -> None:
    """The end waits for the evaluation, so the last checkpoint has its totals."""
    with Gates(tmp_path / "gates", (0, 2, EVALUATORS)) as gates:
        command = start(unisono, run_dir, gates, "--workers", 2, "--evaluators", 1)
        command.line(EVALUATES)
        gates.open(0)
        gates.wait(EVALUATORS)
        gates.wait(2, workers=2)
        assert unisono("stop", run_dir).wait() == 0
        command.line("the run ends at the end of the step")
        gates.open(2)
        gates.open(EVALUATORS)
        assert command.wait() == 0, command.err
    assert saved(run_dir)[-1] in (2, 3)
    outcome = run_workers(SCRIPT, 3, directory=run_dir, arguments=[*arguments(), "--save"])
    check(outcome, run_dir, alone[2])


FAULTS = {
    "rank 0 is killed before it looks": Faults().kill("w0", at="evaluation.asked"),
    "rank 0 is killed when the snapshot is there": Faults().kill("w0", at="evaluation.written"),
    "rank 0 is killed when it knows the answer": Faults().kill("w0", at="talked", step=5, skip=1),
    "another worker is killed before it knows the answer": Faults().kill("w1", at="in_talk", step=5, skip=1),
    "a worker is killed while the result is shared": Faults().kill("w1", at="talked", step=3),
}
ALWAYS = ("rank 0 is killed when the snapshot is there", "a worker is killed while the result is shared")


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("what", FAULTS if ALL else ALWAYS)
def test_losses_change_no_bit(
    what: str,
    unisono: Unisono,
    run_dir: Path,
    tmp_path: Path,
    alone: dict[int, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, encode([*FAULTS[what].faults]))
    with Gates(tmp_path / "gates", (0,)) as gates:
        command = start(unisono, run_dir, gates, "--workers", 2, "--evaluators", 1)
        command.line(EVALUATES)
        gates.open(0)
        finish(command, run_dir, alone[2])


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("what", ["--shard", "--local", "--delay=2", "--twice"] if ALL else ["--shard", "--twice"])
def test_it_goes_with_other_strategies_and_with_several_evaluations_of_a_step(
    what: str, unisono: Unisono, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--steps", "12", what]
    before = run_workers(SCRIPT, 1, directory=tmp_path / "alone", arguments=given[: 2 if what == "--shard" else 3])
    assert before.exit_code == 0, before.output
    monkeypatch.setenv(ENVIRONMENT, encode([*Faults().kill("w0", at="in_talk", step=5, skip=1).faults]))
    with Gates(tmp_path / "gates", (0,)) as gates:
        options = ["--run-dir", tmp_path / "run", "--workers", 3, "--evaluators", 2]
        command = unisono("run", SCRIPT, *options, "--", *given, "--gates", gates.folder)
        if what != "--local":  # its rounds do not stop at gates
            command.line(EVALUATES)
        gates.open(0)
        assert command.wait() == 0, command.err
    assert compare(tmp_path / "alone", tmp_path / "run").startswith("identical")
