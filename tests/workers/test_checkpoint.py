"""Nothing is lost: a run that is stopped by anything goes on with the same bits, and never leaves what cannot be read.

The moments at which whole runs are killed are drawn at random from a fixed seed. The checks take a few of them;
UNISONO_TEST_ALL=1 takes more than forty, with other numbers of workers on every resume.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.parts import ALL
from tests.pure.test_journal import evaluation
from tests.pure.test_journal import step as finished
from tests.waiting import PATIENT, SILENCE_S, WAIT_S
from tests.workers.conftest import Unisono, forked, marked, served_by, wait_until_gone
from tests.workers.disk import wait_for_disk
from tests.workers.gates import Gates
from tests.workers.models import Mlp, vectors
from tests.workers.processes import when_blocked_in
from tests.workers.static_team import AloneRun
from unisono.core.cadence import Position
from unisono.core.cursor import Cursor, Recipe
from unisono.core.errors import CheckpointError, RecipeError, RunDirectoryError, UsageError
from unisono.core.orders import Shuffled
from unisono.engine.checkpoint import saving, snapshot, writer
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.history import History
from unisono.record.journal import JOURNAL, Journal, compare, read
from unisono.record.rundir import RunDirectory, describe
from unisono.script.keeping import Keeper
from unisono.script.schedule import Asked
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome, run_workers
from unisono.views.watch.terminal.drawing import header

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("checkpointed_training.py")
ROOT = str(Path(__file__).resolve().parents[2])
RARE = ("in_recovery", "in_admission", "in_sums", "in_talk", "talked")
STEP_POINTS = [at for at in POINTS if at not in RARE and "." not in at]
CHECKPOINT_POINTS = [at for at in POINTS if at.startswith("checkpoint")]
NUM_KILLS = 4  # of one directory, before it is let to its end
RUNS = range(14) if ALL else range(2)
OF_ALL = ("checkpoint_copied", "checkpoint_part_written")
"""Points to which every worker comes; to the others, the first one."""
LOST = [(at, worker) for at in CHECKPOINT_POINTS for worker in ("w0", "w1") if ALL or worker == "w0" or at in OF_ALL]


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that was never stopped, and wrote no checkpoint before its end."""
    with served_by(standing_nursery):
        return run_workers(SCRIPT, 2, directory=tmp_path_factory.mktemp("calm") / "run", arguments=["--every", "0"])


def names(directory: Path) -> list[str]:
    folder = directory / files.FOLDER
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in files.complete(directory / files.FOLDER)]


def check_readable(directory: Path) -> None:
    """Whatever has its final name is complete, always."""
    for path in files.complete(directory / files.FOLDER):
        files.verify(path)


# -- whole runs that are killed --------------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("number", RUNS)
def test_killing_the_whole_run_again_and_again_changes_no_bit(
    number: int, calm: Outcome, tmp_path: Path, mark: str
) -> None:
    draw = random.Random(number)
    directory = tmp_path / "run"
    workers, killed = draw.randint(1, 4), 0
    for kill in range(NUM_KILLS):
        at = draw.choice(CHECKPOINT_POINTS if kill % 2 == 0 else STEP_POINTS)
        step = -1 if at.startswith("checkpoint") else draw.randrange(12)
        # Manifest and rename are those of the first member.
        who = 0 if at in ("checkpoint_before_manifest", "checkpoint_renamed") else draw.randrange(workers)
        options = ["--resume", str(directory)] if kill else []
        faults = Faults().kill_run(f"w{who}", at=at, step=step)
        outcome = run_workers(SCRIPT, workers, directory=directory, options=options, faults=faults)
        assert outcome.exit_code in (0, -signal.SIGKILL), outcome.output
        killed += outcome.exit_code != 0
        wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)  # who still ends holds the directory
        check_readable(directory)
        workers = draw.choice([other for other in (1, 2, 3, 4) if other != workers])
    end = run_workers(SCRIPT, workers, directory=directory, options=["--resume", str(directory)])
    assert end.exit_code == 0, end.output
    assert killed > 0
    assert (end.digests, end.final, end.evaluations) == (calm.digests, calm.final, calm.evaluations)
    check_readable(directory)
    assert names(directory)[-1] == files.step_name(12)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("at", "worker"), LOST)
def test_losing_one_worker_in_a_checkpoint_changes_no_bit(at: str, worker: str, calm: Outcome, tmp_path: Path) -> None:
    """The attempt that it was part of is dropped, and made again without it."""
    directory = tmp_path / "run"
    faults = Faults().kill(worker, at=at)
    outcome = run_workers(SCRIPT, 2, directory=directory, faults=faults, options=PATIENT, arguments=["--every", "1"])
    assert outcome.exit_code == 0, outcome.output
    assert (outcome.digests, outcome.final) == (calm.digests, calm.final)
    check_readable(directory)
    assert 12 in steps(directory)


SAVES_AT_THE_END = """
    import torch, unisono

    with unisono.Run(seed=1) as run:
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=2, epochs=3):
            for batch in step:
                step.backward(model(batch).mean())
        run.save()
        print("saved", (run.directory / "checkpoints" / "step-0000000003").is_dir())
"""


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("at", ["checkpoint_copied", "checkpoint_before_manifest"])
def test_what_was_saved_after_the_loop_is_there_whoever_was_lost(at: str, tmp_path: Path) -> None:
    """All have forgotten the request when the first begins to write, unless they wait to hear that it is done."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SAVES_AT_THE_END))
    outcome = run_workers(script, 2, directory=tmp_path / "run", options=PATIENT, faults=Faults().kill("w0", at=at))
    assert outcome.exit_code == 0, outcome.output
    assert "saved True" in outcome.output
    check_readable(tmp_path / "run")
    assert steps(tmp_path / "run") == [3]


LOADS_SLOWLY = """
    import sys, torch, unisono
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests.workers.gates import wait_at

    class Slow(torch.nn.Linear):
        loads = 0

        def load_state_dict(self, *state):
            if run.rank == 0:
                print("load", Slow.loads, flush=True)
                wait_at(Path({gates!r}) / str(Slow.loads))
                Slow.loads += 1
            return super().load_state_dict(*state)

    with unisono.Run(seed=1, checkpoint=unisono.Checkpoints(), resume="auto") as run:
        model = Slow(2, 1)
        run.track(model=model)
        steps = run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=2, epochs=6, max_steps=int(sys.argv[1]))
        for step in steps:
            for batch in step:
                step.backward(model(batch).mean())
"""


@pytest.mark.usefixtures("nursery")
def test_a_run_goes_on_whose_checkpoint_takes_longer_to_load_than_an_exchange_may(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path
) -> None:
    """What was loaded while the others gave up is there when all try again; to load it anew would have no end.

    The first worker goes on as soon as it hears that the others have given up: after three times it would be sent away.
    """
    gates = tmp_path / "gates"
    name = script(LOADS_SLOWLY.format(root=ROOT, gates=str(gates)))
    limits = ["--set", f"exchange-timeout={SILENCE_S}s"]
    options = ["--workers", 2, "--run-dir", "run", *limits, "--exchange", "shared", name, "--"]
    first = unisono("run", *options, 2)
    assert first.wait() == 0, first.err
    with Gates(gates, [0, 1, 2]) as held:
        again = unisono("run", *options, 4)
        held.wait(0)
        held.open(0, 2)
        assert again.wait() == 0, again.err
        again.line("trying again; generation 2")
    assert [line for line in again.out if "load " in line] == ["[w0] load 0"]
    assert len(list(read(tmp_path / "run"))) == 5
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]) == 1


def told_checkpoints(directory: Path) -> list[int]:
    """Return the steps of the events about checkpoints; the newest is that of every view."""
    history = History(directory)
    history.refresh()
    told = [event["step"] for event in history.every_event() if event["kind"] == "checkpoint"]
    assert history.overview().checkpoint_step == told[-1]
    return told


@pytest.mark.usefixtures("nursery")
def test_sigterm_finishes_the_step_writes_and_leaves_with_the_code_that_was_asked_for(
    unisono: Unisono, calm: Outcome, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    arguments = ["--workers", 2, "--run-dir", directory, SCRIPT, "--", "--every", "0", "--steps", "100000"]
    command = unisono("run", *arguments)
    command.line("did step 3")
    command.line(" steps  loss ")  # so the command has heard before what a signal is to do
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 75
    check_readable(directory)
    (done,) = steps(directory)
    assert told_checkpoints(directory) == [done]
    assert done == len([line for line in read(directory) if line["kind"] == "step"]) >= 4
    # The rest of a run of exactly as many steps as it has done is nothing.
    again = run_workers(
        SCRIPT, 3, directory=directory, options=["--resume", str(directory)], arguments=["--steps", str(done)]
    )
    other = run_workers(SCRIPT, 1, directory=tmp_path / "other", arguments=["--steps", str(done)])
    assert again.exit_code == other.exit_code == 0
    assert again.final == other.final
    assert compare(directory, tmp_path / "other").startswith(f"identical: {done} steps")


@pytest.mark.usefixtures("nursery")
def test_a_pause_begins_with_a_checkpoint(
    unisono: Unisono, calm: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it ends: here it is stopped. No checkpoint was due before."""
    directory = tmp_path / "run"
    for name, value in Faults().kill("w1", at="before_combine", step=4).environment().items():
        monkeypatch.setenv(name, value)
    options = ["--workers", "2:2", "--max-restarts", 0, "--run-dir", directory]
    command = unisono("run", *options, SCRIPT, "--", "--every", 0)
    command.line("paused: 1 of at least 2 workers")
    assert unisono("stop", directory).wait() == 0
    assert command.wait() == 0, command.err
    assert steps(directory) == told_checkpoints(directory) == [5]
    monkeypatch.undo()
    end = run_workers(SCRIPT, 2, directory=directory, options=["--resume", str(directory)])
    assert (end.digests, end.final, end.evaluations) == (calm.digests, calm.final, calm.evaluations)


def test_sigterm_of_a_run_alone(mark: str, calm: Outcome, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), str(directory), "--every", "0"]
    with subprocess.Popen([*command, "--steps", "1000000"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "did step 3" in line:
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
        assert process.wait() == 75
    assert len(steps(directory)) == 1
    assert told_checkpoints(directory) == steps(directory)


# -- alone, in this process ------------------------------------------------------------------------------


class Seen:
    """Anything with these two methods can be tracked."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def train(
    directory: Path | None,
    *,
    num_steps: int = 6,
    microbatches: int = 4,
    width: int = 8,
    seed: int = 3,
    batch_size: int = 16,
    phases: int = 1,
    delay: int = 0,
    also: dict[str, Any] | None = None,
    wait: bool = False,
    at_head: Callable[[unisono.Run, unisono.Step, nn.Module], object] = lambda run, step, model: None,
    at_step: Callable[[unisono.Run, unisono.Step], object] = lambda run, step: None,
    **settings: Any,
) -> tuple[nn.Module, Seen]:
    with unisono.Run(directory, seed=seed, **settings) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(40, 5, generator=draw), torch.randint(0, 3, (40,), generator=draw))
        model, seen = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3)), Seen()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer, seen=seen, **(also or {}))
        for _ in range(phases):
            for step in run.steps(
                data, batch_size=batch_size, microbatches=microbatches, epochs=100, max_steps=num_steps, delay=delay
            ):
                at_head(run, step, model)
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels))
                    if wait:
                        wait_for_disk(run)
                optimizer.step()
                seen.samples += step.num_samples
                step.log(accuracy=float(step.number % 4))
                if at_step(run, step) == "stop":
                    break
    return model, seen


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


EVERY = unisono.Checkpoints(every_steps=2, keep=10)


def test_a_finished_run_goes_on_where_it_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More steps than before are the rest of a longer run."""
    train(tmp_path / "a", num_steps=5, checkpoint=EVERY)
    model, seen = train(tmp_path / "a", num_steps=9, checkpoint=EVERY, resume="auto")
    other, _ = train(tmp_path / "b", num_steps=9)
    assert same(model, other)
    assert seen.samples == sum(line["samples"] for line in read(tmp_path / "a") if line["kind"] == "step")
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 9 steps")
    assert "nothing is left to do" not in capsys.readouterr().err
    before = History(tmp_path / "a").overview()
    for _ in range(2):
        train(tmp_path / "a", num_steps=9, checkpoint=EVERY, resume="auto")
        assert "nothing is left to do: 9 of 9 steps are done" in capsys.readouterr().err
    after = History(tmp_path / "a").overview()
    names = ("state", "step", "num_steps", "loss", "first", "started", "ended", "elapsed_s", "num_workers", "digests")
    assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names]


def _epochs(directory: Path, epochs: int, *, within: bool) -> dict[str, str]:
    """Train for some epochs, each with its rate; the scheduler is stepped within the loop, or after it."""
    with AloneRun(directory, seed=1, resume="auto", checkpoint=unisono.Checkpoints(every_steps=1000)) as run:
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        for _ in range(epochs):
            for step in run.steps(vectors(24), batch_size=8, microbatches=4):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if within and step.is_last_of_epoch:
                    scheduler.step()
            if not within:
                scheduler.step()
    digests: dict[str, str] = list(read(directory))[-1]["digests"]
    return digests


@pytest.mark.parametrize("within", [True, False])
def test_what_follows_the_last_loop_is_repeated_by_a_longer_run_and_told_to_others(
    within: bool, tmp_path: Path
) -> None:
    """The last checkpoint is from before it, so that further epochs have the bits of a run that was longer at once."""
    _epochs(tmp_path / "a", 2, within=within)
    assert _epochs(tmp_path / "a", 4, within=within) == _epochs(tmp_path / "b", 4, within=within)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unisono.load_weights(tmp_path / "a")
        unisono.load_weights(tmp_path / "a" / "checkpoints" / "step-0000000009", name="optimizer")
        if within:
            assert unisono.load_weights(tmp_path / "a", name="optimizer")["param_groups"][0]["lr"] == 0.5 / 2**4
            return
    with pytest.warns(UserWarning, match=r"has changed 'optimizer' after that, as scheduler\.step"):
        assert unisono.load_weights(tmp_path / "a", name="optimizer")["param_groups"][0]["lr"] == 0.5 / 2**3


def test_no_member_asks_for_the_checkpoint_that_the_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has not loaded it: here, one that is made to forget that it has."""

    def begin_elsewhere(keeper: Keeper, phase: int, recipe: Recipe, asked: Asked) -> Position | None:
        place = begin(keeper, phase, recipe, asked)
        keeper.saver.saved = -1
        return place

    train(tmp_path, num_steps=4, checkpoint=EVERY, wait=True)
    begin = Keeper.begin
    monkeypatch.setattr(Keeper, "begin", begin_elsewhere)
    train(tmp_path, num_steps=8, checkpoint=EVERY, resume="auto", wait=True)
    assert steps(tmp_path) == [2, 4, 6, 8]


@pytest.mark.parametrize("num_steps", [5, 6])
def test_the_checkpoint_after_the_last_step_is_in_every_view(num_steps: int, tmp_path: Path) -> None:
    train(tmp_path, num_steps=num_steps, checkpoint=EVERY, wait=True)
    overview = History(tmp_path).overview()
    assert steps(tmp_path)[-1] == overview.checkpoint_step == num_steps
    assert overview.checkpoint == f"step-{num_steps:010}"
    drawn = ["".join(text for text, _ in line) for line in header(overview, 120, unicode=True)]
    assert any(line.rstrip().endswith(f"   checkpoint {num_steps}") for line in drawn)
    told = told_checkpoints(tmp_path)
    assert told == sorted(set(told))
    assert told[-1] == num_steps


def test_a_second_phase_goes_on_without_the_first(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def fail(run: unisono.Run, step: unisono.Step) -> None:
        if run._rounds is not None and run._rounds.position.phase == 1 and step.number_in_loop == 4:
            raise Stop

    with pytest.raises(Stop):
        train(tmp_path / "a", phases=2, checkpoint=EVERY, wait=True, at_step=fail)
    assert steps(tmp_path / "a")[-1] > 6
    began: list[int] = []
    model, _ = train(
        tmp_path / "a", phases=2, checkpoint=EVERY, resume="auto", at_step=lambda run, step: began.append(step.number)
    )
    assert began[0] > 0
    assert len(began) < 6
    other, _ = train(tmp_path / "b", phases=2)
    assert same(model, other)
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 12 steps")


def test_a_checkpoint_of_another_directory_is_where_a_new_run_begins(tmp_path: Path) -> None:
    train(tmp_path / "a", checkpoint=EVERY, wait=True)
    first = tmp_path / "a" / files.FOLDER / files.step_name(2)
    assert first.exists()
    train(tmp_path / "b", checkpoint=EVERY, resume=first)
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 6 steps")
    assert steps(tmp_path / "a")[-1] == 6


def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    train(tmp_path / "a", checkpoint=EVERY, wait=True)
    newest = tmp_path / "a" / files.FOLDER / files.step_name(6)
    os.truncate(next(newest.glob("part-*")), 1000)
    with pytest.warns(UserWarning, match=r"step-0000000006/part-.* has 1000 bytes, not .*; step-0000000004 is used"):
        model, _ = train(tmp_path / "a", checkpoint=EVERY, resume="auto")
    assert same(model, train(tmp_path / "b")[0])
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 6 steps")
    check_readable(tmp_path / "a")


def flip(checkpoint: Path) -> None:
    part = next(checkpoint.glob("part-*"))
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)


@pytest.mark.filterwarnings("ignore:step-000000000./part-.* is damaged")
def test_broken_checkpoints_do_not_stand_in_the_way_of_new_ones(tmp_path: Path) -> None:
    """They stay to be looked at, and neither count as the newest nor cost a new one its place."""
    folder = tmp_path / files.FOLDER
    train(tmp_path, checkpoint=EVERY, wait=True)
    for step in (4, 6):
        flip(folder / files.step_name(step))
    policy = unisono.Checkpoints(every_steps=1, keep=2)
    train(tmp_path, num_steps=3, checkpoint=policy, resume="auto", wait=True)
    assert names(tmp_path) == [
        "step-0000000002", "step-0000000003", "step-0000000004.broken", "step-0000000006.broken",
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match=r"step-0000000006.broken/part-.* is damaged"):
        files.verify(folder / "step-0000000006.broken")
    began: list[int] = []
    train(tmp_path, num_steps=5, resume="auto", at_step=lambda run, step: began.append(step.number))
    assert began == [3, 4]


@pytest.mark.filterwarnings("ignore:the run continues with a different recipe")
def test_going_back_to_an_older_checkpoint_leaves_the_newer_ones_behind(tmp_path: Path) -> None:
    """They are there until the run has written one, and then it is what the next one goes on from."""
    folder, seen = tmp_path / files.FOLDER, []
    train(tmp_path, checkpoint=EVERY, wait=True)
    policy = unisono.Checkpoints(keep=1)
    train(
        tmp_path, num_steps=3, batch_size=20, checkpoint=policy, resume=folder / files.step_name(2),
        resume_anyway={"batch_size"}, at_step=lambda run, step: seen.append(names(tmp_path)),
    )  # fmt: skip
    assert seen == [[".step-0000000004.abandoned", ".step-0000000006.abandoned", "step-0000000002"]]
    assert names(tmp_path) == ["step-0000000003"]
    began: list[int] = []
    settings: dict[str, Any] = {"batch_size": 20, "resume": "auto"}
    train(tmp_path, num_steps=5, at_step=lambda run, step: began.append(step.number), **settings)
    assert began == [3, 4]
    assert [line["line"] for line in read(tmp_path)] == list(range(6))


def test_checkpoints_of_another_course_do_not_count(tmp_path: Path) -> None:
    """A run that begins at another directory's checkpoint has none of its own, whatever its directory held."""
    train(tmp_path / "a", checkpoint=EVERY, wait=True)
    train(tmp_path / "b", num_steps=8, seed=4, checkpoint=EVERY, wait=True)
    train(tmp_path / "b", checkpoint=EVERY, resume=tmp_path / "a" / files.FOLDER / files.step_name(4), wait=True)
    assert names(tmp_path / "b") == [files.step_name(5), files.step_name(6)], "it is in want of one of its own"
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 6 steps")


def test_the_only_checkpoint_is_found_when_its_writer_was_killed_while_it_replaced_it(tmp_path: Path) -> None:
    train(tmp_path, checkpoint=unisono.Checkpoints())
    (path,) = files.complete(tmp_path / files.FOLDER)
    path.rename(path.with_name(f".{path.name}.replaced"))
    began: list[int] = []
    train(tmp_path, num_steps=8, resume="auto", at_step=lambda run, step: began.append(step.number))
    assert began == [6, 7]


def test_when_all_are_broken_nothing_is_begun_anew(tmp_path: Path) -> None:
    train(tmp_path / "a", checkpoint=unisono.Checkpoints(keep=1))
    (path,) = files.complete(tmp_path / "a" / files.FOLDER)
    (path / files.MANIFEST).unlink()
    before = list(read(tmp_path / "a"))
    with pytest.raises(CheckpointError, match=r"can be used: step-0000000006 has no manifest.json"):
        train(tmp_path / "a", resume="auto")
    assert list(read(tmp_path / "a"))[: len(before)] == before


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    """It was killed before its first one: its journal goes, its place stays."""
    train(tmp_path / "a", num_steps=3)
    train(tmp_path / "a", num_steps=5, resume="auto")
    train(tmp_path / "b", num_steps=5, resume="auto")
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 5 steps")


@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_a_run_that_has_lost_all_its_workers_does_not_begin_again_after_a_step(kind: str, tmp_path: Path) -> None:
    """Also where the head had not heard of the step: the journal has it."""

    def begin() -> Position | None:
        keeper = Keeper(
            tmp_path,
            tracked=Tracked(),
            policy=None,
            resume="",
            anyway=(),
            also_anyway=(),
            command="",
            overwrite=False,
            device=torch.device("cpu"),
            threads=1,
        )
        keeper.enter("r1", alone=False)
        try:
            return keeper.begin(0, Cursor(order=Shuffled.of(8), batch_size=4, microbatches=2, seed=0).recipe, Asked())
        finally:
            keeper.close()

    assert begin() is None
    assert begin() is None
    journal = Journal(tmp_path / JOURNAL)
    journal.start(writer=True)
    journal.emit(finished(0) if kind == "step" else evaluation(0))
    if kind == "evaluation":
        assert begin() is None
    else:
        with pytest.raises(CheckpointError, match=f"does not start again; .*--resume {tmp_path}"):
            begin()


@pytest.mark.parametrize(
    ("changed", "row"),
    [
        ({"microbatches": 8}, r"microbatches +4 +8"),
        ({"batch_size": 20}, r"batch_size +16 +20"),
        ({"seed": 4}, r"seed +3 +4"),
        ({"width": 9}, r"parameters: model.0.weight +float32 \[8, 5\] +float32 \[9, 5\]"),
        ({"threads": 2}, r"threads +1 +2"),
    ],
)
def test_another_recipe_is_refused_with_the_differences(changed: dict[str, Any], row: str, tmp_path: Path) -> None:
    train(tmp_path, num_steps=2, checkpoint=EVERY)
    with pytest.raises(RecipeError) as caught:
        train(tmp_path, resume="auto", **changed)
    assert re.search(row, str(caught.value)), caught.value
    assert ("resume_anyway={'" in str(caught.value)) == ("width" not in changed)
    train(tmp_path, num_steps=3, resume="auto")  # nothing was harmed


def test_another_strategy_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    """Its state is not in the checkpoint, so no word of the user's makes it fit; the weights do."""
    train(tmp_path, num_steps=2, checkpoint=EVERY)
    with pytest.raises(RecipeError, match="delay cannot be named in resume_anyway") as caught:
        train(tmp_path, resume="auto", delay=1, batch_size=20)
    assert "resume_anyway={" not in str(caught.value)
    (advice,) = re.findall(r'unisono\.load_weights\("(.+)", model\)', str(caught.value))
    unisono.load_weights(advice, nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)))


def test_another_number_of_microbatches_by_explicit_word(tmp_path: Path) -> None:
    train(tmp_path / "a", num_steps=2, checkpoint=EVERY)
    with pytest.warns(
        UserWarning, match=r"a different recipe, which resume_anyway allows:\s+checkpoint +script\s+microbatches +4 +8"
    ):
        train(tmp_path / "a", num_steps=4, microbatches=8, resume="auto", resume_anyway={"microbatches"})
    assert len([line for line in read(tmp_path / "a") if line["kind"] == "step"]) == 4
    with pytest.raises(UsageError, match="does not fit a different model"):
        unisono.Run(tmp_path / "a", resume="auto", resume_anyway={"parameters"})
    with pytest.raises(UsageError, match="a set of names"):
        unisono.Run(tmp_path / "a", resume="auto", resume_anyway="microbatches")


def test_objects_that_are_missing_or_new_are_named(tmp_path: Path) -> None:
    train(tmp_path, num_steps=2, checkpoint=EVERY)
    with pytest.raises(UsageError, match=r"tracks \['extra', 'model'.*the run tracks \['model'"):
        train(tmp_path, resume="auto", also={"extra": Seen()})


def test_checkpoints_need_a_directory() -> None:
    with pytest.raises(UsageError, match="checkpoints need the directory of the run"):
        unisono.Run(checkpoint=EVERY)
    with pytest.raises(UsageError, match="resume= needs the directory"):
        unisono.Run(resume="auto")


def test_save_writes_whatever_the_policy_says(tmp_path: Path) -> None:
    def save(run: unisono.Run, step: unisono.Step) -> None:
        if step.number == 1:
            run.save()

    train(tmp_path, wait=True, at_step=save)
    (saved,) = steps(tmp_path)
    assert saved in (2, 3)
    with unisono.Run(tmp_path, resume="auto") as run, pytest.raises(UsageError, match=r"inside run\.steps"):
        run.save()


def test_save_after_the_loop_holds_the_state_as_it_is(tmp_path: Path) -> None:
    """Also where the loop has saved the same step, and not once more at the end of the run."""
    with unisono.Run(tmp_path, seed=1, checkpoint=unisono.Checkpoints()) as run:
        model = nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps(TensorDataset(torch.ones(8, 2)), batch_size=8, microbatches=2, epochs=2):
            for (inputs,) in step:
                step.backward(model(inputs).sum())
        nn.init.constant_(model.weight, 7.0)
        run.save()
        written = next((tmp_path / files.FOLDER).iterdir()).stat().st_ino
        assert unisono.load_weights(tmp_path)["weight"].tolist() == [[7.0, 7.0]]
    assert steps(tmp_path) == [2]
    assert next((tmp_path / files.FOLDER).iterdir()).stat().st_ino == written


def test_a_loop_that_is_left_by_break_is_saved_at_the_end(tmp_path: Path) -> None:
    model, _ = train(tmp_path, checkpoint=unisono.Checkpoints(), at_step=lambda run, step: step.number == 3 and "stop")
    assert steps(tmp_path) == [4]
    loaded = unisono.load_weights(tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


def test_the_newest_the_best_and_every_nth_are_left(tmp_path: Path) -> None:
    policy = unisono.Checkpoints(every_steps=2, keep=2, keep_best="accuracy", best="max", keep_every=5)
    train(tmp_path, num_steps=14, checkpoint=policy, wait=True)
    assert steps(tmp_path) == [4, 10, 12, 14]
    assert files.read_manifest(tmp_path / files.FOLDER / files.step_name(4)).metrics["accuracy"] == 3.0


def test_a_figure_of_run_log_belongs_to_the_checkpoint_of_its_step_only(tmp_path: Path) -> None:
    """Also where the run was resumed from that checkpoint. The loss and what ``step.log`` gave are in all of them."""

    def log(run: unisono.Run, step: unisono.Step) -> None:
        if step.number in (3, 8, 13):
            run.log({"val/x": float(step.number)})

    for num_steps in (14, 18):
        train(tmp_path, num_steps=num_steps, checkpoint=EVERY, resume="auto", wait=True, at_step=log)
    metrics = {
        step: files.read_manifest(tmp_path / files.FOLDER / files.step_name(step)).metrics for step in steps(tmp_path)
    }
    assert {step: each.get("val/x") for step, each in metrics.items()} == {
        **dict.fromkeys(range(2, 19, 2)), 4: 3.0, 14: 13.0,
    }  # fmt: skip
    assert all({"loss", "accuracy"} <= each.keys() for each in metrics.values())


def test_checkpoints_of_a_clock(tmp_path: Path) -> None:
    train(tmp_path, checkpoint=unisono.Checkpoints(every_seconds=1e-9, keep=10), wait=True)
    assert len(steps(tmp_path)) >= 3


# -- members whose reports are carried by hand -----------------------------------------------------------


class InSight(RunDirectory):
    """A directory that is in sight of a worker, or not."""

    def __init__(self, path: Path, is_seen: bool) -> None:
        super().__init__(path)
        self._is_there = is_seen

    def look(self) -> bool:
        return self.is_seen


def make_saver(worker_id: str, policy: unisono.Checkpoints | None, directory: RunDirectory) -> saving.Saver:
    state = {"objects": {"model": {f"weight{n}": torch.full((n,), float(n)) for n in range(1, 9)}}}
    tracked = SimpleNamespace(whole_state=lambda: state, updated=set, holders=lambda paths: [()] * len(paths))
    saver = saving.Saver(policy, directory, torch.device("cpu"), cast(Tracked, tracked))
    saver.join(worker_id, {}, {})
    return saver


class Members:
    """The savers of one run: all in this process, and everything in an order that is known."""

    def __init__(
        self,
        directory: Path,
        *,
        reaches: tuple[bool, ...] = (True, True),
        policy: unisono.Checkpoints | None = EVERY,
    ) -> None:
        self.directory = directory
        self.ids = [f"w{rank}" for rank in range(len(reaches))]
        self.savers = [
            make_saver(worker_id, policy, InSight(directory, one))
            for worker_id, one in zip(self.ids, reaches, strict=True)
        ]
        self.generation, self.total = 1, 0

    @property
    def moment(self) -> snapshot.Moment:
        place = Position(phase=0, step=self.total, number=self.total, total=self.total, lines=self.total)
        return snapshot.Moment(place, self.generation, self.ids, {})

    def boundary(self) -> None:
        for saver in self.savers:
            saver.boundary(self.moment)

    def step(self, number: int = 1, *, slow_disk: bool = False) -> None:
        """Combine, update, come to the boundary after it."""
        for _ in range(number):
            self.combine(self.savers)
            self.boundary()
            if not slow_disk:
                self.drain()

    def combine(self, committed: list[saving.Saver]) -> None:
        """Combine; only some members get to know it."""
        reports = [saver.report() for saver in self.savers]
        self.total += 1
        for saver in committed:
            saver.on_reports(reports, self.generation, self.ids)

    def drain(self) -> None:
        for saver in self.savers:
            saver._writer.drain()

    def save_last(self) -> None:
        wishes = {me: saver.wish(self.generation) for me, saver in zip(self.ids, self.savers, strict=True)}
        for saver in self.savers:
            saver.begin_last(self.moment, wishes)
            saver.publish_last()
        for saver in self.savers:
            saver.finish()

    def confirm(self) -> None:
        """All have heard that all have waited for the last one."""
        for saver in self.savers:
            saver.confirm()

    def lose(self, rank: int = 0) -> None:
        """In the middle of a step, which the others finish in the next generation."""
        self.savers[rank]._writer.close()
        del self.savers[rank], self.ids[rank]
        self.generation += 1


def check_whole(directory: Path) -> None:
    """Every checkpoint has the files of its manifest, and no other."""
    for path in files.complete(directory / files.FOLDER):
        assert {one.name for one in path.iterdir()} == {files.MANIFEST, *files.verify(path).files}


def test_the_last_checkpoint_holds_nothing_of_the_one_that_had_just_begun(tmp_path: Path) -> None:
    members = Members(tmp_path)
    members.step(2)
    assert len(list((tmp_path / files.FOLDER).glob(".step-*/part-*.safetensors"))) == 2
    members.save_last()
    assert steps(tmp_path) == [2]
    check_whole(tmp_path)


class Killed(Exception):
    """Ends the thread that it is raised in, as the process ends that it stands for."""


@pytest.mark.parametrize(
    ("at", "there", "then"),
    [("checkpoint_before_manifest", [], [13]), ("checkpoint_renamed", [10], [10]), ("nowhere", [10], [10])],
)
def test_a_checkpoint_that_is_lost_with_who_publishes_it_is_made_again(
    at: str, there: list[int], then: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when the next one is due. One that has its name is not made again."""

    def end(name: str) -> None:
        if name == at:
            raise Killed

    monkeypatch.setattr(writer, "point", end)
    members = Members(tmp_path, policy=unisono.Checkpoints(every_steps=10, keep=10))
    members.step(11)
    assert steps(tmp_path) == there
    monkeypatch.undo()
    members.lose()
    members.step(8)
    assert steps(tmp_path) == then


def test_no_part_is_removed_while_the_publisher_still_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member was lost then. What is published is whole, and is not made again."""
    goes_on = threading.Event()

    def hold(name: str) -> None:
        assert name != "checkpoint_before_manifest" or goes_on.wait(WAIT_S)

    monkeypatch.setattr(writer, "point", hold)
    members = Members(tmp_path, reaches=(True, True, True), policy=unisono.Checkpoints(every_steps=10, keep=10))
    members.step(10)
    members.step(slow_disk=True)
    members.lose(2)
    members.step(2, slow_disk=True)
    assert len(list((tmp_path / files.FOLDER).glob(".step-*/part-*.safetensors"))) == 3
    goes_on.set()
    members.drain()
    members.step(4)
    assert names(tmp_path) == [files.step_name(10)]
    check_whole(tmp_path)


def test_a_member_that_is_a_step_ahead_takes_no_snapshot_alone(tmp_path: Path) -> None:
    """It has seen the commit that the others repeat without the lost one; then all take one at the same boundary."""
    members = Members(tmp_path, reaches=(True, True, True))
    members.step()
    members.combine(members.savers[:1])
    members.savers[0].boundary(members.moment)
    members.drain()
    members.lose(2)
    members.total -= 1
    members.combine(members.savers)
    members.savers[1].boundary(members.moment)
    members.drain()
    assert steps(tmp_path) == []
    members.step(2)
    assert names(tmp_path) == [files.step_name(3)]
    check_whole(tmp_path)


@pytest.mark.parametrize("who", ["part-00001", "manifest"])
def test_all_members_end_when_a_checkpoint_that_must_succeed_did_not(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that have done their part: none of them waits for the others in a step that never comes."""
    write = files.write_file

    def write_some(path: Path, data: memoryview, *rest: Any) -> Any:
        if path.name.startswith(who):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data, *rest)

    members = Members(tmp_path, policy=unisono.Checkpoints(every_steps=2, must_succeed=True))
    monkeypatch.setattr(files, "write_file", write_some)
    members.step(2)
    for _ in range(2 if who == "manifest" else 1):
        members.combine(members.savers)
        members.drain()
    for saver in members.savers:
        with pytest.raises(CheckpointError, match=r"step 2 was not written.* The run ends because"):
            saver.boundary(members.moment)
        saver.close()


def test_who_does_not_see_the_directory_does_not_ask_for_what_is_there(tmp_path: Path) -> None:
    members = Members(tmp_path, reaches=(False, True))
    members.total = members.savers[1].saved = 4
    members.boundary()  # before the first step of a resumed run
    assert [saver.report().wants for saver in members.savers] == [False, False]


def test_the_first_that_sees_the_directory_writes_the_last_checkpoint(tmp_path: Path) -> None:
    members = Members(tmp_path, reaches=(False, True, True), policy=unisono.Checkpoints())
    members.step(3)
    members.save_last()
    assert steps(tmp_path) == [3]
    assert [saver.saved for saver in members.savers] == [-1, 3, -1]
    members.step()
    members.lose()
    members.lose()
    members.save_last()  # before a step of that generation: it is the first, and sees it
    assert steps(tmp_path) == [3, 4]


@pytest.mark.filterwarnings("ignore:the checkpoint of step 3 was not written")
@pytest.mark.parametrize("when", ["at the end", "in the last step"])
@pytest.mark.parametrize("at", ["checkpoint_copied", "checkpoint_before_manifest"])
def test_a_checkpoint_that_was_asked_for_is_written_by_the_next_if_its_writer_is_lost(
    when: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other steps follow at once, and nothing waits for it."""

    def end(name: str) -> None:
        if name == at:
            raise Killed

    members = Members(tmp_path, policy=None)
    members.step(3)
    for saver in members.savers:
        saver.request()
    monkeypatch.setattr(writer, "point", end)
    with contextlib.suppress(Killed):
        members.save_last()
    assert steps(tmp_path) == []
    monkeypatch.undo()
    members.lose()
    if when == "in the last step":
        members.step(3)
    else:
        members.save_last()
    assert len(steps(tmp_path)) == 1
    check_whole(tmp_path)
    members.save_last()
    members.confirm()
    members.save_last()
    assert [saver.report().wants for saver in members.savers] == [False]
    assert len(steps(tmp_path)) == 1


def test_a_checkpoint_that_was_lost_in_the_last_step_is_made_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the disk has not said yet that it is not there."""

    def end(name: str) -> None:
        if name == "checkpoint_before_manifest":
            raise Killed

    members, has_looked = Members(tmp_path, policy=None), threading.Event()
    members.savers[0].request()
    members.step()
    monkeypatch.setattr(writer, "point", end)
    members.step()
    monkeypatch.undo()
    members.lose()
    members.savers[0]._writer.submit(lambda: has_looked.wait(WAIT_S))
    members.step(slow_disk=True)
    when_blocked_in({"drain"}, has_looked.set)
    members.save_last()
    has_looked.set()
    assert steps(tmp_path) == [3]


@pytest.mark.filterwarnings("ignore:the checkpoint of step . was not written into")
@pytest.mark.parametrize("who", ["part-00000", "part-00001", "skeleton", "manifest"])
@pytest.mark.parametrize("last", [False, True])
def test_nothing_is_left_of_a_checkpoint_that_found_no_room(
    who: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever could not write; on a full disk it would take the room of what comes next."""
    write = files.write_file

    def write_some(path: Path, data: memoryview, *rest: Any) -> Any:
        if path.name.startswith(who):
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data, *rest)

    members = Members(tmp_path, policy=unisono.Checkpoints() if last else EVERY)
    monkeypatch.setattr(files, "write_file", write_some)
    members.step(2 if last else 5)
    if last:
        members.save_last()
    for saver in members.savers:
        saver.close()
    assert names(tmp_path) == (["step-0000000002"] if last and who == "part-00001" else [])


def test_who_is_left_knows_who_sees_the_directory(tmp_path: Path) -> None:
    """From what was said before the loss: nothing more is said when no step follows."""
    members = Members(tmp_path, reaches=(True, False, True), policy=unisono.Checkpoints())
    members.step(3)
    members.lose()
    members.save_last()
    assert steps(tmp_path) == [3]
    assert [saver.saved for saver in members.savers] == [-1, 3]


def test_that_nobody_can_write_the_last_checkpoint_is_said(tmp_path: Path) -> None:
    members = Members(tmp_path, reaches=(False, False))
    members.step(3)
    with pytest.warns(UserWarning, match=r"the checkpoint of step 3 was not written into .*: no remaining worker sees"):
        members.save_last()
    with warnings.catch_warnings(action="error"):
        members.save_last()  # once: the end of the run comes after the end of its loop
    assert steps(tmp_path) == []
    members.step()
    members = Members(tmp_path, reaches=(False, False), policy=unisono.Checkpoints(must_succeed=True))
    with pytest.raises(CheckpointError, match=r"no remaining worker sees that directory.* The run ends because"):
        members.save_last()


def test_a_checkpoint_holds_nothing_that_a_killed_run_had_written_of_it(tmp_path: Path) -> None:
    """That run had three workers, and generations are counted from 1 in every run."""
    partial = tmp_path / files.FOLDER / files.partial_name(2, 1)
    partial.mkdir(parents=True)
    for part in range(3):
        (partial / files.part_name(part, 3)).write_text("half")
        (partial / files.part_name(part, 3)).with_suffix(".facts").write_text("{}")
    Members(tmp_path).step(4)
    assert steps(tmp_path) == [2]
    check_whole(tmp_path)


# -- copied while the next step computes -----------------------------------------------------------------

WIDE = 60_000  # so that one layer is copied late


def check_saved(directory: Path, step: int, other: Path) -> None:
    """The checkpoint of this step holds what a run has that ends with it."""
    if not other.exists():
        train(other, num_steps=step, width=WIDE, checkpoint=unisono.Checkpoints())
    found = [files.read_manifest(place / files.FOLDER / files.step_name(step)).files for place in (directory, other)]
    assert found[0] == found[1], "checksums of all files"


def test_a_large_state_is_copied_while_the_next_step_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy begins only when nothing else is left to do, and the update waits for it."""
    computing, copied = threading.Event(), []
    when_blocked_in({"_wait_for_copy"}, computing.set)
    do = snapshot.LateCopy.run

    def late(copy: snapshot.LateCopy, goes_on: Callable[[], bool]) -> None:
        assert computing.wait(WAIT_S)
        copied.append(copy)
        do(copy, goes_on)

    def after(run: unisono.Run, step: unisono.Step, model: nn.Module) -> None:
        assert step.number != 2 or not copied
        if step.number > 2:
            wait_for_disk(run)

    monkeypatch.setattr(snapshot.LateCopy, "run", late)
    train(tmp_path / "a", num_steps=7, width=WIDE, checkpoint=EVERY, at_head=after)
    assert len(copied) >= 3, "the layer, and its two moments"
    check_saved(tmp_path / "a", 2, tmp_path / "b")


def test_a_change_between_the_steps_is_seen(tmp_path: Path) -> None:
    """The copy that it may have spoiled is thrown away; the next is made before anything can change."""

    def change(run: unisono.Run, step: unisono.Step, model: nn.Module) -> None:
        if step.number in (2, 3):
            with torch.no_grad():
                next(model.parameters()).mul_(1.0)

    with pytest.warns(
        UserWarning, match=r"1 parameters or optimizer states were changed between the beginning of step 2"
    ):
        train(tmp_path / "a", num_steps=5, width=WIDE, checkpoint=EVERY, wait=True, at_head=change)
    assert steps(tmp_path / "a") == [3, 5]
    check_saved(tmp_path / "a", 3, tmp_path / "b")


def test_without_overlap_everything_is_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot.LateCopy, "run", lambda copy, goes_on: pytest.fail("something was left for later"))
    policy = unisono.Checkpoints(every_steps=2, keep=10, overlap=False)
    train(tmp_path / "a", num_steps=5, width=WIDE, checkpoint=policy, wait=True)
    check_saved(tmp_path / "a", 2, tmp_path / "b")


# -- disks that do not do what they should ---------------------------------------------------------------


def test_every_name_on_the_way_to_a_checkpoint_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of directories that the run has made itself, too: without them, nothing under them is found after a power cut."""
    synchronize, rename, done = os.fsync, Path.rename, []

    def note(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        synchronize(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        done.append(path)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", note_rename)
    directory = tmp_path / "runs" / "a"
    train(directory, num_steps=2, checkpoint=unisono.Checkpoints())
    folder = directory / files.FOLDER
    (renamed,) = [place for place, path in enumerate(done) if path.suffix == ".partial" and path in done[:place]]
    assert {tmp_path, tmp_path / "runs", directory} <= set(done[:renamed])
    assert folder in done[renamed:]


def test_a_slow_disk_makes_checkpoints_wait_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_again = threading.Event()
    whole = files.write_file

    def slow(path: Path, data: memoryview, *rest: Any) -> Any:
        if path.suffix == ".safetensors":
            open_again.wait(WAIT_S)
        return whole(path, data, *rest)

    monkeypatch.setattr(files, "write_file", slow)
    monkeypatch.setattr("unisono.engine.checkpoint.saving.SLOW_S", 0.0)
    done: list[int] = []

    def watch(run: unisono.Run, step: unisono.Step) -> None:
        done.append(step.number)
        if step.number == 8:
            open_again.set()

    with pytest.warns(UserWarning, match=r"the checkpoint of step 4 is waiting: that of step 2 has been writing for"):
        train(tmp_path, num_steps=10, checkpoint=EVERY, at_step=watch)
    assert done == list(range(10)), "no step waited for the disk"
    check_readable(tmp_path)
    assert steps(tmp_path)[-1] == 10


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of a few bytes, where that is permitted."""
    folder.mkdir(parents=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()) != 0:
        pytest.skip(f"mount is not permitted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(str(folder).encode(), 2)


def make_read_only(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(folder).encode(), None, 32 | 1, None) != 0:  # MS_REMOUNT | MS_RDONLY
        pytest.skip(f"remount is not permitted: {os.strerror(ctypes.get_errno())}")


def test_a_full_disk_is_a_warning_and_what_was_there_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / files.FOLDER, "96k"):
        train(tmp_path, num_steps=2, width=200, checkpoint=unisono.Checkpoints(keep=10))
        assert steps(tmp_path) == [2]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _, seen = train(tmp_path, num_steps=12, width=200, checkpoint=EVERY, resume="auto", wait=True)
        assert seen.samples > 0
        full = [str(w.message) for w in said if "No space left on device; training continues" in str(w.message)]
        assert len(full) >= 2, "each that was due was tried"
        assert names(tmp_path) == [files.step_name(step) for step in steps(tmp_path)], "what failed needs no room"
        check_readable(tmp_path)
        assert 2 in steps(tmp_path)


def test_a_failed_write_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / files.FOLDER, "16k"):
        policy = unisono.Checkpoints(every_steps=2, must_succeed=True)
        with pytest.raises(CheckpointError, match=r"step 2 was not written into .*: No space left on device. The run"):
            train(tmp_path, num_steps=100, width=200, checkpoint=policy, wait=True)
        assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    with small_disk(tmp_path / files.FOLDER, "1m"):
        make_read_only(tmp_path / files.FOLDER)
        with pytest.warns(UserWarning, match=r"was not written into .*: Read-only file system; training continues"):
            train(tmp_path, num_steps=6, checkpoint=EVERY, wait=True)
    assert len([line for line in read(tmp_path) if line["kind"] == "step"]) == 6


# -- a directory that is taken away ----------------------------------------------------------------------


@pytest.mark.parametrize("then", ["stays away", "comes back", "another one is there"])
def test_a_directory_that_is_moved_is_told_once_and_not_made_anew(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the workers would make has neither the description of the run, nor its lock, nor the first lines."""
    monkeypatch.setattr("unisono.record.rundir.LOOK_EVERY_S", 0.0)
    run_dir, moved = tmp_path / "run", tmp_path / "moved"

    def move(run: unisono.Run, step: unisono.Step) -> None:
        if step.number == 3:
            run_dir.rename(moved)
            if then == "another one is there":
                train(run_dir, num_steps=1)
        if step.number == 8 and then == "comes back":
            moved.rename(run_dir)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(run_dir, num_steps=12, checkpoint=EVERY, wait=True, at_step=move)
    told = [str(one.message) for one in said]
    assert len([text for text in told if f"no worker sees the run directory {run_dir} any more" in text]) == 1, told
    rest = [text for text in told if "no worker sees" not in text]
    assert all("was not written into" in text for text in rest), rest
    assert len(rest) <= (1 if then == "comes back" else 2), "the one that was under way, and the last"
    if then == "comes back":
        assert f"the run directory {run_dir} is there again" in capsys.readouterr().err
        train(tmp_path / "calm", num_steps=12)
        assert compare(run_dir, tmp_path / "calm").startswith("identical: 12 steps")
        assert "missing" not in compare(run_dir, tmp_path / "calm")
        assert steps(run_dir)[-1] == 12
    elif then == "stays away":
        assert not run_dir.exists()
    else:
        assert len([line for line in read(run_dir) if line["kind"] == "step"]) == 1
        assert steps(run_dir) == []
    if then != "comes back":
        assert [line["step"] for line in read(moved)] == [0, 1, 2]
        check_readable(moved)


def test_what_another_run_writes_in_a_directory_of_the_same_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks like the rest of a writer that was killed may be the work of one that is not of this run."""
    members = Members(tmp_path, reaches=(True,))
    members.step()
    theirs = tmp_path / files.FOLDER / ".step-0000000009-1.partial"
    theirs.mkdir(parents=True)
    monkeypatch.setattr(InSight, "look", lambda directory: False)  # it was moved since, and theirs has its place
    members.step()
    with pytest.warns(UserWarning, match="the run's directory was removed or moved"):
        members.step()
    for saver in members.savers:
        saver.close()
    assert list((tmp_path / files.FOLDER).iterdir()) == [theirs]


def test_a_directory_that_is_removed_in_the_last_step_is_told(tmp_path: Path) -> None:
    def remove(run: unisono.Run, step: unisono.Step) -> None:
        if step.number == 3:
            shutil.rmtree(tmp_path / "run")

    with pytest.warns(UserWarning, match="no worker sees the run directory"):
        train(tmp_path / "run", num_steps=4, at_step=remove)
    assert not (tmp_path / "run").exists()


# -- two runs on one directory ---------------------------------------------------------------------------


def test_two_runs_cannot_go_on_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.record.rundir.LOCK_PATIENCE_S", 0.0)
    refused: list[str] = []

    def second(run: unisono.Run, step: unisono.Step) -> None:
        for settings in ({"resume": "auto"}, {"overwrite": True}):
            with pytest.raises(RunDirectoryError) as caught:
                train(tmp_path, **settings)
            refused.append(str(caught.value))

    train(tmp_path, num_steps=1, at_step=second)
    assert len(refused) == 2
    for text in refused:
        assert f"a run is active in {tmp_path} (" in text
        assert f"pid {os.getpid()} on" in text
    train(tmp_path, num_steps=2, resume="auto")  # it is free again


@pytest.mark.usefixtures("nursery")
def test_workers_cannot_take_the_directory_of_a_run_that_is_going(unisono: Unisono, tmp_path: Path) -> None:
    first = unisono("run", "--workers", 2, "--run-dir", tmp_path / "run", SCRIPT, "--", "--steps", 100000)
    first.line(" steps  loss ")  # so the command has heard what a signal is to do
    second = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "run"), "--resume", "auto"],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert "a run is active in" in second.stderr
    third = unisono("run", "--workers", 1, "--resume", tmp_path / "run", SCRIPT)
    assert third.wait() == 2
    assert "a run is active in" in third.line("a run is active in")
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 75


# -- the command -----------------------------------------------------------------------------------------

FAILS_ONCE = """
    import pathlib, sys, torch, unisono

    sys.path.insert(0, {root!r})
    from tests.workers.disk import wait_for_disk

    failed = pathlib.Path("failed")
    with unisono.Run(seed=1, checkpoint=unisono.Checkpoints(every_steps=3)) as run:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        data = torch.arange(32.0).view(16, 2) / 32
        for step in run.steps(data, batch_size=8, microbatches=int(sys.argv[1]), epochs=100):
            for batch in step:
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if not failed.exists():
                wait_for_disk(run)
                if any(run.directory.glob("checkpoints/step-*")):
                    failed.touch()
                    sys.exit("it was to fail")
"""


@pytest.mark.usefixtures("nursery")
def test_a_run_knows_its_script_arguments_folder_and_threads(unisono: Unisono, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(textwrap.dedent(FAILS_ONCE.format(root=ROOT)))
    there = ["sh", "-c", 'cd work && exec "$@"', "sh"]
    options = ["-n", 2, "--threads", 2, "--run-dir", "../run", "train.py", "--", 4]
    assert unisono("run", *options, before=there).wait() == 1
    again = unisono("run", "--resume", "run", "-n", 1)
    assert again.wait() == 0, again.err
    again.line(f"resuming train.py 4 in {tmp_path / 'work'}")
    again.line("resuming at step ")
    options[options.index("../run")] = "../calm"
    assert unisono("run", *options, before=there).wait() == 0
    assert compare(tmp_path / "run", tmp_path / "calm").startswith("identical: 200 steps")
    other = unisono("run", "--resume", "run", "work/train.py", "--", 8)
    assert other.wait() == 1
    other.line("resume_anyway={'microbatches'} or --set resume-anyway=microbatches")
    asked_for = unisono("run", "--resume", "run", "--set", "resume-anyway=microbatches", "work/train.py", "--", 8)
    assert asked_for.wait() == 0, asked_for.err
    asked_for.line("a different recipe, which resume_anyway allows")


def test_the_command_lists_verifies_and_exports(unisono: Unisono, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = train(tmp_path / "run", checkpoint=EVERY, wait=True)
    listed = unisono("checkpoints", "run")
    assert listed.wait() == 0
    assert [line.split()[0] for line in listed.out] == names(tmp_path / "run")
    assert unisono("checkpoints", "run", "export", "model.safetensors").wait() == 0
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    assert unisono("checkpoints", "run", "export", "o.pt", "--name", "optimizer", "--step", "4").wait() == 0
    assert set(torch.load(tmp_path / "o.pt")) == {"state", "param_groups"}
    losses = {
        path.name: files.read_manifest(path).metrics["loss"] for path in files.complete(tmp_path / "run" / files.FOLDER)
    }
    for wanted, choose in (("loss", min), ("max:loss", max)):
        found = unisono("checkpoints", "run", "--best", wanted)
        assert found.wait() == 0
        assert [line.split()[0] for line in found.out] == [choose(losses, key=losses.__getitem__)]
    refused = unisono("checkpoints", "run", "export", "best.pt", "--best", "val/loss")
    assert refused.wait() == 2
    refused.line("no checkpoint has a figure 'val/loss'; there are: accuracy, loss")
    newest = files.complete(tmp_path / "run" / files.FOLDER)[-1]
    (newest / files.MANIFEST).unlink()
    verified = unisono("checkpoints", "run", "check")
    assert verified.wait() == 1
    assert "broken: step-0000000006 has no manifest.json" in verified.out[-1]
    assert verified.out[0].endswith("every byte is correct")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--resume", "alone"], "alone does not say which script it was made with; give the script"),
        (["run", "--resume", "moved"], "the run began in /nowhere, which cannot be used (No such file or directory)"),
        (["run", "--resume", "gone"], "there is no script gone.py (looked in /)"),
        (["run", "--set", "resume-anyway=seed", "x.py"], "give --resume DIR as well"),
        (["checkpoints", "nowhere"], "nowhere holds no checkpoint; give the directory of a run"),
        (["run", "--resume", "nowhere", "x.py"], "--resume nowhere: there is no such directory"),
        (["run", "--resume", ".", "--overwrite", "x.py"], "give only one of them"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], said: str, unisono: Unisono, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    facts = {
        "alone": {},
        "moved": {"command": {"folder": "/nowhere", "arguments": ["x.py"]}},
        "gone": {"command": {"folder": "/", "arguments": ["gone.py"]}},
    }
    for name, known in facts.items():
        (tmp_path / name).mkdir()
        describe(tmp_path / name, {"run_id": "1", **known})
    command = unisono(*arguments)
    assert command.wait() == 2
    assert said in "\n".join(command.err)
