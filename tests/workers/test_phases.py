"""A script with more than one `run.steps`: who joins later skips what is over."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import unisono
from tests.workers.conftest import Command, Unisono
from tests.workers.disk import wait_for_disk
from tests.workers.gates import Gates
from tests.workers.models import Mlp, vectors
from tests.workers.static_team import AloneRun
from unisono.core.errors import StepError
from unisono.engine.rounds.team import Team
from unisono.record.journal import JOURNAL, compare, from_line, read
from unisono.record.journal.times import by_step
from unisono.record.overview import OverviewBuilder
from unisono.testing import Faults, run_workers
from unisono.views.watch.terminal.base import done

pytestmark = pytest.mark.usefixtures("nursery")

# What is tracked in the second phase is made between the two, and an evaluation stands there as well.
SCRIPT = """
import pathlib, sys, torch, unisono
from torch.nn import functional as F
from torch.utils.data import TensorDataset
sys.path.insert(0, HERE)
from tests.workers.gates import wait_at

with unisono.Run(seed=3) as run:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(54, 12, generator=generator), torch.randint(0, 4, (54,), generator=generator))
    model = torch.nn.Sequential(torch.nn.Linear(12, 33), torch.nn.Dropout(0.2), torch.nn.Linear(33, 4))

    def evaluate():
        run.evaluate(data, lambda b: {"loss": F.cross_entropy(model(b[0]), b[1], reduction="sum")}, batch_size=7)

    def train(optimizer, steps):
        for step in run.steps(data, batch_size=24, microbatches=8, epochs=1000, max_steps=steps):
            if steps == 20 and len(sys.argv) > 1:
                wait_at(pathlib.Path(sys.argv[1]) / str(step.number_in_loop))
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    first = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, first=first)
    train(first, 5)
    evaluate()
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(second=second)
    train(second, 20)
    evaluate()
"""


def test_a_newcomer_joins_in_the_second_phase(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calm, hurt = tmp_path / "train.py", tmp_path / "calm", tmp_path / "hurt"
    script.write_text(f"HERE = {str(Path(__file__).parents[2])!r}\n{SCRIPT}")
    outcome = run_workers(script, 1, directory=calm)
    assert outcome.exit_code == 0, outcome.output
    faults = Faults().kill("w1", at="before_combine", step=14)  # which all pass, also who computes nothing
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (12,)) as gates:
        command = unisono("run", script, "-n", 3, "--run-dir", hurt, "--", gates.folder)
        gates.wait(12)
        gates.open(12, command.generation("w3 joins"))
        assert command.wait() == 0, command.err
    assert compare(calm, hurt).startswith("identical: 25 steps")
    sizes = [len(workers) for workers in by_step(hurt).values()]
    assert sizes[-1] == 3  # the replacement was admitted, and has skipped the first phase


# The second layer is trained on what the first one makes of the data, once that is trained.
LAYERS = """
import pathlib, sys, torch, unisono
from torch.nn import functional as F
from torch.utils.data import TensorDataset
sys.path.insert(0, HERE)
from tests.workers.disk import wait_for_disk
from tests.workers.gates import wait_at

with unisono.Run(seed=3, checkpoint=unisono.Checkpoints(every_steps=6) if RESUMES else None) as run:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(54, 12, generator=generator)
    labels = torch.randint(0, 4, (54,), generator=generator)
    first = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh())
    second = torch.nn.Linear(16, 4)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, second)]
    run.track(first=first, second=second, a=optimizers[0], b=optimizers[1])

    def train(inputs, model, optimizer, steps):
        data = TensorDataset(inputs, labels)
        for step in run.steps(data, batch_size=24, microbatches=8, epochs=1000, max_steps=steps):
            wait_at(pathlib.Path(sys.argv[1]) / str(step.number_in_loop))
            wait_for_disk(run)
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y), weight=len(y))
            optimizer.step()

    train(inputs, first, optimizers[0], 5)
    first.eval()
    with torch.no_grad():
        hidden = first(inputs)
    if sys.argv[2] == "goes on":
        train(hidden, torch.nn.Sequential(second, torch.nn.Identity()), optimizers[1], 11)
    else:  # the first layer is trained further, so what it has made is not what a newcomer would make
        train(inputs + hidden[:, :12], torch.nn.Sequential(first, second), optimizers[0], 11)
"""


def write_layers(tmp_path: Path, *, resumes: bool = False) -> Path:
    script = tmp_path / "layers.py"
    script.write_text(f"HERE = {str(Path(__file__).parents[2])!r}\nRESUMES = {resumes}\n{LAYERS}")
    return script


def lose_one_in_the_second_phase(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch, script: Path, kind: str
) -> Command:
    """A run with a replacement that has seen nothing of the first phase."""
    for name, value in Faults().kill("w1", at="before_combine", step=12).environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (9,)) as gates:
        command = unisono("run", script, "-n", 3, "--run-dir", tmp_path / "hurt", "--", gates.folder, kind)
        gates.wait(9)
        gates.open(9, command.generation("w3 joins"))
        command.wait()
    return command


def test_a_newcomer_makes_the_data_of_the_second_phase_with_the_model_of_the_run(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_layers(tmp_path)
    assert run_workers(script, 1, directory=tmp_path / "calm", arguments=["/nonexistent", "goes on"]).exit_code == 0
    command = lose_one_in_the_second_phase(tmp_path, unisono, monkeypatch, script, "goes on")
    assert command.process.returncode == 0, command.err
    assert compare(tmp_path / "calm", tmp_path / "hurt").startswith("identical: 16 steps")


def test_a_newcomer_that_makes_other_data_is_sent_away_and_no_bit_changes(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_layers(tmp_path)
    assert run_workers(script, 1, directory=tmp_path / "calm", arguments=["/nonexistent", "differs"]).exit_code == 0
    command = lose_one_in_the_second_phase(tmp_path, unisono, monkeypatch, script, "differs")
    assert command.process.returncode == 0, command.err
    assert compare(tmp_path / "calm", tmp_path / "hurt").startswith("identical: 16 steps")
    said = " ".join(command.err)
    assert re.search(r"w3 \(pid \d+\) is sent away and not replaced", said)
    assert ": it has skipped 1 call of run.steps" in said
    assert "The batches differ already: the cause is in the data" in said
    assert "w4" not in said


def test_a_run_that_is_resumed_makes_the_data_of_the_second_phase_with_its_model(tmp_path: Path) -> None:
    script, arguments = write_layers(tmp_path, resumes=True), ["/nonexistent", "goes on"]
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    assert run_workers(script, 2, directory=calm, arguments=arguments).exit_code == 0
    faults = Faults().kill_run("w0", at="before_combine", step=8)
    run_workers(script, 2, directory=hurt, arguments=arguments, faults=faults)
    again = run_workers(script, 3, directory=hurt, arguments=arguments, options=["--resume", str(hurt)])
    assert again.exit_code == 0, again.output
    assert "resuming at step" in again.output
    assert compare(calm, hurt).startswith("identical: 16 steps")


class StopEarly(Exception):
    pass


def _epochs(directory: Path, stop: int) -> list[tuple[int, bool, bool, Any]]:
    """An epoch loop of the script's own; what it sees after each epoch, until it stops in the third step of one."""
    seen: list[tuple[int, bool, bool, Any]] = []
    with (
        contextlib.suppress(StopEarly),
        AloneRun(directory, seed=1, checkpoint=unisono.Checkpoints(every_steps=1), resume="auto") as run,
    ):
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for epoch in range(3):
            for step in run.steps(vectors(), batch_size=24, microbatches=6):
                wait_for_disk(run)
                if (epoch, step.index) == (stop, 2):
                    raise StopEarly
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                    step.add(x=x.sum())
                optimizer.step()
            seen.append((epoch, run.is_catching_up, run.is_main, run.totals))
    return seen


def test_what_stands_between_epochs_that_are_over_knows_it_and_finds_their_totals(tmp_path: Path) -> None:
    """So nothing is saved or printed a second time, and what follows from the totals follows again."""
    calm = _epochs(tmp_path / "calm", -1)
    assert [each[:3] for each in calm] == [(epoch, False, True) for epoch in range(3)]
    assert _epochs(tmp_path / "hurt", 1) == calm[:1]
    resumed = _epochs(tmp_path / "hurt", -1)
    assert [each[:3] for each in resumed] == [(0, True, False), (1, False, True), (2, False, True)]
    assert [each[3] for each in resumed] == [each[3] for each in calm]
    assert compare(tmp_path / "calm", tmp_path / "hurt").startswith("identical: 9 steps")


class Stop(Exception):
    pass


@pytest.mark.parametrize("left", [False, True], ids=["at its end", "by break"])
def test_a_run_that_is_resumed_draws_the_same_numbers_between_two_loops(tmp_path: Path, left: bool) -> None:
    """As a script does that chooses the samples of each epoch at random. A worker that joins later draws them, too."""

    def train(directory: Path, stops: bool) -> list[float]:
        policy = unisono.Checkpoints(every_steps=1)
        with AloneRun(directory, seed=3, checkpoint=policy, resume="auto") as run:
            model = Mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            drawn = []
            for epoch in range(4):
                drawn.append(float(torch.rand(())))
                for step in run.steps(vectors(), batch_size=24, microbatches=2):
                    wait_for_disk(run)
                    if stops and epoch == 2 and step.index == 1:
                        raise Stop
                    for x, y in step:
                        step.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    if left and step.index == 1:
                        break
        return drawn

    with pytest.raises(Stop):
        train(tmp_path / "a", True)
    assert train(tmp_path / "a", False) == train(tmp_path / "b", False)
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical")


def test_a_loop_that_was_left_by_break_is_over_at_once() -> None:
    """So what stands behind it may track further objects, and is not taken for a part of the loop."""
    with AloneRun(seed=3) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            if step.index == 1:
                break
        assert run._training.loop is not None
        assert not run._training.loop.is_open
        run.track(values={"best": 0.5})


def test_everything_names_a_step_by_its_number_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an epoch loop with one `run.steps` for each epoch: what the script reads, messages, and what the head gets."""
    told: list[tuple[int, int]] = []

    def at(team: Any, *, phase: int, step: int, microbatch: int, **rest: Any) -> None:
        told.append((step, microbatch))

    monkeypatch.setattr(Team, "at", at)
    seen = []

    def train() -> None:
        with AloneRun(seed=3) as run:
            model = Mlp()
            run.track(model=model)
            for epoch in range(2):
                for step in run.steps(vectors(), batch_size=24, microbatches=4):
                    with pytest.raises(StepError, match=f"outside of the inner loop .* of step {step.number},"):
                        step.add(one=1)
                    for inputs, labels in step:
                        if (epoch, step.index) == (1, 1):
                            raise ValueError("too bad")
                        F.cross_entropy(model(inputs), labels).backward()
                    seen.append((step.number, step.index, step.epoch, repr(step).split(":")[0]))

    with pytest.raises(ValueError, match="too bad") as raised:
        train()
    assert seen == [(number, number % 3, number // 3, f"<step {number}") for number in range(4)]
    assert told[-1] == (4, 0)
    assert "(in step 4, micro-batch 0, samples" in raised.value.__notes__[0]


@pytest.mark.parametrize("says", [True, False])
def test_a_run_that_goes_on_knows_its_length_if_its_epoch_loop_says_it(says: bool, tmp_path: Path) -> None:
    def train(fails_at: int) -> None:
        every = unisono.Checkpoints(every_steps=1)
        with AloneRun(tmp_path, seed=3, checkpoint=every, resume="auto") as run:
            model = Mlp()
            run.track(model=model)
            for _ in run.epochs(4) if says else range(4):
                for step in run.steps(vectors(), batch_size=24, microbatches=4):
                    wait_for_disk(run)
                    for inputs, labels in step:
                        F.cross_entropy(model(inputs), labels).backward()
                    if step.number == fails_at:
                        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        train(5)
    train(99)
    steps = [line for line in read(tmp_path / JOURNAL) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [*range(12)]
    assert {line["num_steps"] for line in steps} == {12 if says else 0}
    builder, shown = OverviewBuilder(), []
    for event in map(from_line, steps):
        assert event is not None
        builder.take(event)
        shown.append(done(builder.overview(0.0)))
    assert [shown[5], shown[11]] == (
        ["6 of 12 steps", "12 of 12 steps"] if says else ["6 steps, epoch 1", "12 steps, epoch 3"]
    )
