"""Replay: a run is computed again up to a step, compared with its journal, and looked into."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.waiting import WAIT_S
from tests.workers.disk import wait_for_disk
from unisono.cli.again import PastRun
from unisono.cli.replay import replay
from unisono.cluster.worker import member
from unisono.core.errors import LossError, StopInspection, UsageError
from unisono.core.replay_rules import Replay
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.core.words import without_evidence
from unisono.record.journal import JOURNAL
from unisono.script import open_runs
from unisono.system.lifetime import PARENT
from unisono.testing import Faults, run_workers
from unisono.tools.replay.hunting import script_stack

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("checkpointed_training.py")
EVERY = unisono.Checkpoints(every_steps=2, keep=100)
Train = Callable[[Path], None]


def begun(directory: Path) -> tuple[unisono.Run, TensorDataset, nn.Module]:
    run = unisono.Run(directory, seed=3, checkpoint=EVERY)
    data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
    return run, data, nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))


def train(
    directory: Path, *, passes: int = 1, shards: bool = False, bad_at: int = -1, spoil_at: int = -1, **arguments: Any
) -> None:
    run, data, model = begun(directory)
    with run:
        made = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = unisono.shard(made) if shards else made
        run.track(model=model, optimizer=optimizer)
        for _ in range(2):
            for step in run.steps(data, batch_size=12, microbatches=4, epochs=9, max_steps=5, **arguments):
                wait_for_disk(run)
                if step.number == spoil_at:
                    model[3].weight.data[0, 0] = torch.nan
                for number in range(passes):
                    for inputs, labels in step.again() if number else step:
                        loss = F.cross_entropy(model(inputs), labels)
                        if step.number == bad_at and step.microbatch == 2:
                            loss = loss + (model(inputs) * 0).sqrt().sum()  # finite, and its gradient is not
                        loss.backward()
                        step.add(seen=len(labels))
                if step.has_gradient:
                    optimizer.step()


def train_locally(directory: Path, **arguments: Any) -> None:
    run, data, model = begun(directory)
    with run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for part in run.local_steps(
            data, batch_size=8, microbatches=4, replicas=2, inner_steps=2, epochs=9, max_steps=10, **arguments
        ):
            wait_for_disk(run)
            for step in part:
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()


STRATEGIES: dict[str, Train] = {
    "plain": train,
    "several passes": partial(train, passes=2),
    "sharded": partial(train, shards=True),
    "delayed": partial(train, delay=2),
    "rounded": partial(train, wire="bf16"),
    "delayed, with parameters that are predicted": partial(train, delay=1, predict=True),
    "local steps": train_locally,
}


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    yield
    member.settle(RunSpec())


def replayed(trained: Train, run: Path, step: int, **asked: Any) -> StopInspection:
    """Replay a run in this process; returns how it has ended."""
    again = PastRun(run, (str(SCRIPT),))
    own = run.with_name(f"{run.name}-own-{time.monotonic_ns()}")
    wanted = Replay(run=str(run), step=step, looks="leaf" in asked, fingerprint=again.fingerprint, **asked)
    member.settle(again.spec(again.start(step), str(own), "replay", msgspec.json.encode(wanted).decode()))
    with pytest.raises(StopInspection) as stopped:
        trained(run)
    return stopped.value


def line_of(text: str) -> int:
    """The number of the first line of this file that has a text."""
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def altered(run: Path, step: int, **values: Any) -> None:
    """Write other values into a step's line of the journal."""
    lines = [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] == step:
            line.update(values)
    (run / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_replayed_from_a_checkpoint(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    STRATEGIES[name](tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    step = 3 if "local steps" in name else 8
    inner = {"replica": 1, "inner": 1} if "local steps" in name else {}
    ended = replayed(STRATEGIES[name], tmp_path / "run", step, leaf=1, **inner)
    assert ended.code == 0, ended
    assert str(ended).startswith(f"step {step}: loss ")
    assert "as in the journal" in str(ended)
    out, err = capfd.readouterr()
    assert f"of {'round' if inner else 'step'} {step}: loss " in out
    assert "resuming at step" in err, "it begins from a checkpoint"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


@pytest.mark.parametrize(("name", "value"), [("digest", "0" * 16), ("loss", 1.0)])
def test_a_value_of_the_journal_that_is_wrong_is_found(name: str, value: object, tmp_path: Path) -> None:
    train(tmp_path / "run")
    altered(tmp_path / "run", 9, **{name: value})
    ended = replayed(train, tmp_path / "run", 9)
    assert ended.code == 1
    assert f"step 9 is the first that does not match the journal: {name} is " in str(ended)
    assert f"and {value} there" in str(ended)


def test_a_step_that_differs_counts_where_the_last_one_has_no_line_to_compare(tmp_path: Path) -> None:
    train(tmp_path / "run")
    altered(tmp_path / "run", 8, digest="0" * 16)
    altered(tmp_path / "run", 9, kind="lost")
    ended = replayed(train, tmp_path / "run", 9, leaf=1)
    assert ended.code == 1
    assert str(ended).startswith("step 9: loss ")
    assert "step 8 is the first that does not match the journal: digest is " in str(ended)


def test_a_micro_batch_is_compared_with_what_the_run_has_audited(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run")
    first = replayed(train, tmp_path / "run", 8, leaf=3)
    assert "audited" not in str(first)
    digest = capfd.readouterr().out.partition(", digest ")[2][:16]
    altered(tmp_path / "run", 8, audits={"3": digest, "1": "f" * 16})
    equal = replayed(train, tmp_path / "run", 8, leaf=3)
    assert equal.code == 0
    assert str(equal).startswith(f"micro-batch 3: digest {digest}, and the run has audited the same\nstep 8: loss ")
    other = replayed(train, tmp_path / "run", 8, leaf=1)
    assert other.code == 1
    assert f"and the run has audited {'f' * 16}" in str(other)


def test_a_run_of_other_arithmetic_may_be_looked_into(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    facts["fingerprint"] |= {"device": "cuda", "device name": "H100"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    altered(tmp_path / "run", 9, digest="0" * 16)
    ended = replayed(train, tmp_path / "run", 9)
    assert ended.code == 1
    assert "which is expected: device: cuda then, cpu now; device name: H100 then, none now" in str(ended)
    assert "the bits may differ" in capfd.readouterr().err


def test_what_was_saved_gives_the_same_gradients_again(tmp_path: Path) -> None:
    train(tmp_path / "run")
    replayed(train, tmp_path / "run", 8, leaf=2, save=str(tmp_path / "found"))
    found = torch.load(tmp_path / "found" / "step-8-microbatch-2.pt", weights_only=False)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
    model.load_state_dict(found["models"]["model"])
    torch.set_rng_state(found["generators"]["cpu"])
    inputs, labels = found["batch"]
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward(torch.full_like(loss, found["factor"]))
    assert loss.item() == found["loss"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, found["gradients"][f"model.{name}"]), name


def test_a_gradient_that_is_not_finite_is_named_and_anomaly_detection_names_its_operation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = partial(train, bad_at=9)
    script(tmp_path / "run")
    ended = replayed(script, tmp_path / "run", 9, leaf=2)
    assert "micro-batch 2 of step 9: loss " in (out := capfd.readouterr().out), ended
    assert "not finite: the gradient of " in out
    again = PastRun(tmp_path / "run", (str(SCRIPT),))
    wanted = Replay(run=str(tmp_path / "run"), step=9, leaf=2, looks=True, anomaly=True)
    member.settle(again.spec(None, str(tmp_path / "own"), "replay", msgspec.json.encode(wanted).decode()))
    with pytest.raises(RuntimeError, match="MulBackward0"), pytest.warns(UserWarning, match="loss = loss"):
        script(tmp_path / "run")
    assert not torch.is_anomaly_enabled()


def spoil_and_look(folder: Path, *, leaf: int) -> None:
    """Train until the parameters are NaN, at step 9, and look for what is not finite there in a micro-batch."""
    script = partial(train, spoil_at=9)
    with pytest.raises(LossError, match=r"the loss of step 9, micro-batch 0 is nan.*unisono replay RUN"):
        script(folder / "run")
    again = PastRun(folder / "run", (str(SCRIPT),))
    wanted = Replay(run=str(folder / "run"), step=9, leaf=leaf, looks=True, anomaly=True)
    member.settle(again.spec(again.start(9), str(folder / "own"), "replay", msgspec.json.encode(wanted).decode()))
    with pytest.raises(LossError) as raised:
        script(folder / "run")
    assert "unisono replay" not in str(raised.value), "that is what is being done"


def test_the_micro_batch_that_fails_before_the_wanted_one_is_looked_into(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil_and_look(tmp_path, leaf=3)
    said = capfd.readouterr().err
    assert "the first module whose output is not finite is model.3 (Linear); its inputs are finite" in said
    assert "the script has ended in micro-batch 0 of step 9, before micro-batch 3 was reached" in said


def test_the_stack_of_a_forward_pass_has_the_lines_of_the_script_only() -> None:
    frames = [f'  File "{file}", line 1, in f\n    f()\n' for file in (unisono.__file__, "train.py", torch.__file__)]
    assert script_stack(f"Error detected in SqrtBackward0.\n{''.join(frames)} (Triggered)") == (
        f"Error detected in SqrtBackward0.\n{frames[1]}"
    )
    assert script_stack(f"Error.\n{frames[0]}") == f"Error.\n{frames[0]}", "better than nothing"


def test_the_first_module_whose_output_is_not_finite_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil_and_look(tmp_path, leaf=0)
    said = capfd.readouterr().err
    assert "the first module whose output is not finite is model.3 (Linear); its inputs are finite" in said
    assert "not finite already before the micro-batch: model.3.weight\n" in said
    assert f", in line {line_of('model(inputs), labels)')} of {__file__}; its inputs have some already" in said
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"step": 50}, "without doing step 50: its steps are 0 to 9"),
        ({"step": 8, "leaf": 4}, "the micro-batches of step 8 are 0 to 3; got 4"),
        ({"step": 8, "leaf": 1, "turn": 1}, "step 8 has no pass 1"),
        ({"step": 8, "leaf": 1, "replica": 0}, "step 8 is no round of local steps"),
    ],
)
def test_what_is_not_there_is_said(asked: dict[str, int], said: str, tmp_path: Path) -> None:
    train(tmp_path / "run")
    ended = replayed(train, tmp_path / "run", **asked)
    assert (said in str(ended), ended.code) == (True, 2), ended


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    again = PastRun(tmp_path / "run", (str(SCRIPT),))
    nearest = again.start(9)
    assert nearest is not None
    part = next(Path(nearest.path).glob("part-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(bytes(data))
    start = again.start(9)
    assert start is not None
    assert start.step < nearest.step
    assert "an older one is used" in capsys.readouterr().err
    for part in (tmp_path / "run").glob("checkpoints/*/part-*"):
        part.write_bytes(part.read_bytes()[:-1])
    assert again.start(9) is None
    said = capsys.readouterr().err.splitlines()
    assert ["an older one is used" in line for line in said] == [True] * (len(said) - 1) + [False]
    assert said[-1].endswith("; there is no older one")


def test_a_run_without_its_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in"):
        PastRun(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "1"}))
    with pytest.raises(UsageError, match="does not say which script it was made with; give the script"):
        PastRun(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--with save="):
        replay.main([str(tmp_path), "--step", "1", "--with", f"save={tmp_path / 'file'}"], standalone_mode=False)


def test_the_evidence_of_a_trial_is_not_offered() -> None:
    said = ["unisono: evidence (stacks, memory, last events): problems/a.txt in the run's directory", "LossError"]
    assert without_evidence(said) == ["LossError"]


def test_another_script_gets_the_arguments_of_the_run_unless_it_has_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = {"folder": str(tmp_path), "arguments": ["gone.py", "--lr", "1"]}
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "1", "command": command}))
    assert PastRun(tmp_path, (str(SCRIPT),)).arguments == [str(SCRIPT), "--lr", "1"]
    assert "gets the arguments of the run: --lr 1" in capsys.readouterr().err
    assert PastRun(tmp_path, (str(SCRIPT), "--lr", "2")).arguments == [str(SCRIPT), "--lr", "2"]
    with pytest.raises(UsageError, match=r"there is no script gone\.py .* A different script may be given"):
        PastRun(tmp_path)


def test_a_step_after_the_end_of_a_finished_run_is_refused_at_once(tmp_path: Path) -> None:
    train(tmp_path / "run")
    again = PastRun(tmp_path / "run", (str(SCRIPT),))
    again.check_step(9)
    with pytest.raises(UsageError, match="no step 10: it has finished, and its last step is 9"):
        again.check_step(10)


def test_an_interrupt_of_the_command_ends_the_script_that_it_runs(tmp_path: Path) -> None:
    """Only the command gets the signal, and not its whole group; and it begins nothing more."""
    run = trained(tmp_path, "train", TRAINING)
    script = "import sys, time\nprint('here', flush=True, file=sys.stderr)\ntime.sleep(600)\n"
    (tmp_path / "train.py").write_text(script)
    other = trained(tmp_path, "other", TRAINING.replace("lr=0.1", "lr=0.2"))
    for command in (["replay", str(run), "--step", "2"], ["compare", str(run), str(other), "--explain"]):
        child = subprocess.Popen(
            [sys.executable, "-m", "unisono", *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        try:
            assert child.stderr is not None
            assert any(line == "here\n" for line in child.stderr)
            child.send_signal(signal.SIGINT)
            assert child.wait(WAIT_S) == 130
            assert "other again" not in child.stderr.read()
        finally:
            child.kill()
            child.communicate()


def test_a_run_of_four_workers_with_a_crash_is_replayed_by_one(nursery: None, tmp_path: Path) -> None:
    faults = Faults().kill("w1", step=5, at="after_backward")
    done = run_workers(
        SCRIPT, 4, directory=tmp_path / "run", arguments=["--every", "3"], faults=faults, timeout_s=WAIT_S
    )
    assert done.exit_code == 0, done.output
    command = [sys.executable, "-m", "unisono", "replay", str(tmp_path / "run"), "--step", "10", "--micro-batch", "5"]
    ended = subprocess.run(
        command,
        env={**os.environ, PARENT: str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "micro-batch 5 of step 10: loss " in ended.stdout
    assert f"digest {done.digests[10]}, as in the journal" in ended.stdout


def test_the_debugger_stops_in_the_line_of_the_script_after_the_batch(tmp_path: Path) -> None:
    run = trained(tmp_path, "train", TRAINING)
    with debugged(run) as (ours, child):
        said = read_until(ours, "(Pdb) ")
        assert "unisono: before micro-batch 1 of step 2" in said
        assert "train.py(" in said.rpartition("before micro-batch")[2]
        os.write(ours, b"p step.microbatch, step.number\n")
        assert "(1, 2)" in read_until(ours, "(Pdb) ")
        os.write(ours, b"c\n")
        read_until(ours, "as in the journal")
        assert child.wait(WAIT_S) == 0
    with debugged(run) as (ours, child):
        read_until(ours, "(Pdb) ")
        os.write(ours, b"q\n")
        said = read_until(ours, "2 steps were computed again")
        assert "left in micro-batch 1 of step 2" in said
        assert child.wait(WAIT_S) == 3, "the step was not reached"
        assert "evidence" not in said


@contextmanager
def debugged(run: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Replay a run with a debugger in a terminal of its own; yields the terminal and the command."""
    command = [sys.executable, "-m", "unisono", "replay", str(run), "--step", "2", "--micro-batch", "1"]
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen(
            [*command, "--with", "debugger"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        os.close(theirs)
        try:
            yield ours, child
        finally:
            child.kill()
            child.wait()
    finally:
        os.close(ours)


def read_until(descriptor: int, wanted: str) -> str:
    """Read a terminal until it has shown something."""
    said, deadline = "", time.monotonic() + WAIT_S
    while wanted not in said:
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], said
        try:
            said += os.read(descriptor, 4096).decode(errors="replace")
        except OSError:
            break
    assert wanted in said, said
    return said


TRAINING = """
import torch, unisono
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
    def forward(self, scores):
        return scores * self.weight

with unisono.Run(seed=3) as run:
    data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), Tail())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=12, microbatches=4, epochs=2, max_steps=6):
        for inputs, labels in step:
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
"""


def trained(tmp_path: Path, name: str, text: str) -> Path:
    """Train by a script of this text, alone; returns the run's directory."""
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    member.settle(
        RunSpec(settings=RunSettings(run_dir=str(tmp_path / name)), arguments=(str(script),), folder=str(tmp_path))
    )
    open_runs.end_all(None)
    exec(compile(text, str(script), "exec"), {"__name__": "__main__"})
    return tmp_path / name


def test_two_runs_that_differ_are_explained_by_computing_both_again(tmp_path: Path) -> None:
    """The second script trains as the first, until it scales the output of one module from step 4 on."""
    run = trained(tmp_path, "a", TRAINING)
    changed = TRAINING.replace(
        "        for inputs", "        model[3].weight.requires_grad_(step.number < 4)\n        for inputs"
    )
    changed = changed.replace(
        "scores * self.weight", "scores * self.weight * (1.0 if self.weight.requires_grad else 1.5)"
    )
    other = trained(tmp_path, "b", changed)
    ended = compared(run, other)
    assert ended.returncode == 1, ended.stderr
    where = [line for line in ended.stdout.splitlines() if line.startswith("where: ")]
    assert "different: step 4 is the first to differ: digest is " in ended.stdout
    assert where[0].startswith("where: micro-batch 0 of step 4 is the first that differs, with the same data and the")
    assert "the first module whose output differs, in the order of the forward pass, is model.3." in where[0]
    assert where[1].startswith("where: 4 of the 4 micro-batches of the step differ")
    assert "why: the script's text was different in the two runs" in ended.stdout


def test_a_weight_that_is_changed_before_the_inner_loop_is_named(tmp_path: Path) -> None:
    """The state before the step is equal, and that of the micro-batches is not."""
    run = trained(tmp_path, "a", TRAINING)
    spoilt = "        step.number == 4 and model[0].weight.data[0, 0].mul_(1.5)\n        for inputs"
    ended = compared(run, trained(tmp_path, "b", TRAINING.replace("        for inputs", spoilt)))
    assert ended.returncode == 1, ended.stderr
    where = [line for line in ended.stdout.splitlines() if line.startswith("where: ")]
    assert where[0].startswith("where: micro-batch 0 of step 4 is the first that differs: the state before the step")
    assert "the first tensor is model['0.weight']. So something changes it" in where[0]


def test_a_script_that_was_changed_between_two_runs_is_named(tmp_path: Path) -> None:
    """One path, edited between the runs: both are computed with the text that is there now."""
    first = trained(tmp_path, "train", TRAINING)
    first.rename(tmp_path / "first")
    second = trained(tmp_path, "train", TRAINING.replace("model(inputs)", "model(inputs * 2)"))
    ended = compared(tmp_path / "first", second)
    assert ended.returncode == 1, ended.stderr
    assert "different: step 0 is the first to differ" in ended.stdout
    assert "first, recomputed here, does not match its own journal: step 0 is the first" in ended.stdout
    assert "Its step 0 is now that of " in ended.stdout
    assert "why: the script's text was different in the two runs" in ended.stdout


def compared(run: Path, other: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "compare", "--explain", str(run), str(other)]
    environment = {**os.environ, PARENT: str(os.getpid())}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
