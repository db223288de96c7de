"""Workers join and leave a run that is going, at known steps, and not one bit changes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono, wait_until_gone
from tests.workers.gates import Gates
from unisono.cli.reach import ask_status, find
from unisono.journal import compare, read
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.usefixtures("nursery")

SCRIPT = Path(__file__).with_name("small_training.py")
STEPS = 60


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker, all the time."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        outcome = run_workers(SCRIPT, 1, directory=folder, arguments=["--steps", str(STEPS)])
    assert outcome.exit_code == 0, outcome.output
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def on_two_cores() -> list[str]:
    """What starts a command on two cores: of A to B workers, it starts as many as there are cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    code = f"import os, sys; os.sched_setaffinity(0, {cores}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code]


def start(
    unisono: Unisono,
    run_dir: Path,
    gates: Gates | None,
    workers: object,
    *options: object,
    before: Sequence[str] = (),
) -> Command:
    place = ("--gates", gates.folder) if gates is not None else ()
    arguments = ("-n", workers, "--run-dir", run_dir, *options, "--", "--steps", STEPS, *place)
    return unisono("run", SCRIPT, *arguments, before=before)


def join(unisono: Unisono, run_dir: Path, workers: int) -> Command:
    url = json.loads((run_dir / "head.json").read_text())["url"]
    return unisono("join", url, "--token-file", run_dir / "token", "-n", workers)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read(run_dir) if line["kind"] == "step"]


def sizes(run_dir: Path) -> list[int]:
    """How many workers did each step."""
    return [len(line["workers"]) for line in steps_of(run_dir)]


def pid_of(worker_id: str, run_dir: Path) -> int:
    workers = ask_status(find(str(run_dir)))["workers"]
    return int(next(worker["pid"] for worker in workers if worker["worker_id"] == worker_id))


def finish(command: Command, run_dir: Path, calm: Path) -> None:
    assert command.wait() == 0, command.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")


def start_with_guest(unisono: Unisono, run_dir: Path, gates: Gates) -> tuple[Command, Command]:
    """A run of two, and a machine that has joined it with one; all are at gate 20."""
    command = start(unisono, run_dir, gates, 2)
    gates.wait(3)
    guest = join(unisono, run_dir, 1)
    command.line("w2 joins; generation 2 with 3 workers")
    gates.open(3)
    gates.wait(20)
    return command, guest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_a_machine_joins_and_leaves(
    exchange: str, number: signal.Signals, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    """`unisono join` adds two workers to two; Ctrl-C there takes them away again, at the end of a step."""
    with Gates(tmp_path / "gates", (3, 20, 40, 58)) as gates:
        command = start(unisono, run_dir, gates, 2, "--exchange", exchange)
        gates.wait(3)
        guest = join(unisono, run_dir, 2)
        command.line("; generation 2 with")
        gates.open(3)
        command.line("with 4 workers")
        gates.open(20)
        gates.wait(40)
        guest.process.send_signal(number)
        command.line("w2 and w3")
        gates.open(40)
        assert guest.wait() == 0, guest.err
        assert any("the workers of this machine leave at the end of the step" in line for line in guest.err)
        assert "all workers of this machine have left" in guest.out[-1]
        gates.open(58)
        finish(command, run_dir, calm)
    counts = sizes(run_dir)
    assert counts[:4] == [2, 2, 2, 2]
    assert counts[40] == 4
    assert counts[-1] == 2


def test_a_machine_whose_workers_were_sent_away_leaves_at_the_first_signal(
    unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", (3, 20, 50)) as gates:
        command, guest = start_with_guest(unisono, run_dir, gates)
        pid = pid_of("w2", run_dir)
        assert unisono("scale", run_dir, 2).wait() == 0
        gates.open(20)
        wait_until_gone({pid}, time.monotonic() + WAIT_S)
        guest.process.send_signal(signal.SIGINT)
        assert guest.wait() == 0, guest.err
        assert "all workers of this machine have left" in guest.out[-1]
        gates.open(50)
        finish(command, run_dir, calm)


def test_the_machine_that_joined_is_gone(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """`kill -9` of the joined command takes its workers with it; the run goes on with its own."""
    with Gates(tmp_path / "gates", (3, 20)) as gates:
        command, guest = start_with_guest(unisono, run_dir, gates)
        guest.process.kill()
        command.line("is gone")
        command.line("generation 3 with 2 workers")
        gates.open(20)
        finish(command, run_dir, calm)
    assert sizes(run_dir)[19] == 3
    assert sizes(run_dir)[-1] == 2


def test_scale_up_and_down(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """`unisono scale` makes two workers four, and four workers one, while they train."""
    with Gates(tmp_path / "gates", (3, 20, 40)) as gates:
        command = start(unisono, run_dir, gates, 2)
        gates.wait(3)
        grow = unisono("scale", run_dir, 4)
        assert grow.wait() == 0, grow.err
        assert "scaled to 4 workers, from 2" in grow.out[0]
        command.line("; generation 2 with")
        gates.open(3)
        command.line("with 4 workers")
        gates.open(20)
        gates.wait(40)
        shrink = unisono("scale", run_dir, 1)
        assert shrink.wait() == 0, shrink.err
        command.line("w1, w2 and w3")
        gates.open(40)
        finish(command, run_dir, calm)
    counts = sizes(run_dir)
    assert counts[3] == 2
    assert counts[40] == 4
    assert counts[-1] == 1


def test_stop_ends_the_run_at_the_end_of_a_step(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """`unisono stop`: what was trained is complete and in the journal, and the command says that it was stopped."""
    with Gates(tmp_path / "gates", (20,)) as gates:
        command = start(unisono, run_dir, gates, 3)
        gates.wait(20)
        stop = unisono("stop", run_dir)
        assert stop.wait() == 0, stop.err
        assert "the run ends at the end of the step" in stop.out[0]
        gates.open(20)
        assert command.wait() == 0, command.err
        assert "stopped by `unisono stop`" in command.out[-1]
    digests = [line["digest"] for line in steps_of(run_dir)]
    assert 20 < len(digests) < STEPS
    assert digests == [line["digest"] for line in steps_of(calm)][: len(digests)]


def test_at_least_two_at_most_four(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """``--workers 2:4`` takes two of three that join; the last one takes the place of one that dies."""
    with Gates(tmp_path / "gates", (3, 20, 40, 58)) as gates:
        command = start(unisono, run_dir, gates, "2:4", "--max-restarts", 0, before=on_two_cores())
        gates.wait(3)
        guest = join(unisono, run_dir, 3)
        command.line("; generation 2 with")
        gates.open(3)
        command.line("with 4 workers")
        gates.open(20)
        gates.wait(40)
        waiting = ({"w2", "w3", "w4"} - steps_of(run_dir)[-1]["workers"].keys()).pop()
        os.kill(pid_of("w1", run_dir), signal.SIGKILL)
        command.line("was killed by signal 9")
        gates.open(40)
        command.line(f"{waiting} joins")
        gates.open(58)
        finish(command, run_dir, calm)
        assert guest.wait() == 0, guest.err
    by_step = [set(line["workers"]) for line in steps_of(run_dir)]
    assert by_step[0] == {"w0", "w1"}
    assert max(map(len, by_step)) == 4
    assert by_step[-1] == {"w0", "w2", "w3", "w4"}


def test_too_few_workers_wait_for_more(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """With fewer than the minimum the run pauses and says so; another machine joins, and it goes on."""
    with Gates(tmp_path / "gates", (5,)) as gates:
        command = start(unisono, run_dir, gates, "2:3", "--max-restarts", 0, before=on_two_cores())
        gates.wait(5)
        os.kill(pid_of("w0", run_dir), signal.SIGKILL)
        command.line("paused: 1 of at least 2 workers")
        gates.open(5)
        assert ask_status(find(str(run_dir)))["state"] == "paused"
        guest = join(unisono, run_dir, 1)
        command.line("w2 joins; generation 3 with 2 workers")
        finish(command, run_dir, calm)
        assert guest.wait() == 0, guest.err
    by_step = [list(line["workers"]) for line in steps_of(run_dir)]
    assert by_step[4] == ["w0", "w1"]
    assert by_step[-1] == ["w1", "w2"]


def test_a_paused_run_can_be_stopped_and_scaled(unisono: Unisono, run_dir: Path, tmp_path: Path) -> None:
    """`unisono scale` to what is there lets a paused run go on; `unisono stop` ends one."""
    with Gates(tmp_path / "gates", (5, 20)) as gates:
        command = start(unisono, run_dir, gates, "3:3", "--max-restarts", 0)
        gates.wait(5)
        os.kill(pid_of("w2", run_dir), signal.SIGKILL)
        command.line("paused: 2 of at least 3 workers")
        gates.open(5)
        assert unisono("scale", run_dir, 2).wait() == 0
        gates.wait(20)
        os.kill(pid_of("w1", run_dir), signal.SIGKILL)
        command.line("paused: 1 of at least 2 workers")
        gates.open(20)
        assert unisono("stop", run_dir).wait() == 0
        assert command.wait() == 0, command.err
    assert 20 < len(steps_of(run_dir)) < STEPS


ONE_TENSOR = """
    import torch, unisono

    with unisono.Run(seed=3) as run:
        model = torch.nn.Linear(12, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = list(torch.randn(54, 12, generator=torch.Generator().manual_seed(1)))
        for step in run.steps(data, batch_size=24, microbatches=8, epochs=1000, max_steps=8):
            for batch in step:
                step.backward(model(batch).square().mean(), weight=len(batch))
            optimizer.step()
"""


def test_a_loss_at_the_end_of_an_admission_finds_some_in_the_step_already(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few are left then: who is still at the boundary does not pause there, but with the others after the step."""
    name = script(ONE_TENSOR)
    calm = unisono("run", name, "-n", 1, "--run-dir", tmp_path / "calm")
    assert calm.wait() == 0, calm.err
    faults = Faults().kill("w0", step=3, at="before_combine").kill("w3", at="in_admission")
    for variable, value in faults.environment().items():
        monkeypatch.setenv(variable, value)
    options = ["--workers", "4:4", "--exchange", "two-level", "--simulate-hosts", 2]
    hurt = unisono("run", *options, "--run-dir", tmp_path / "hurt", name)
    hurt.line("paused: 3 of at least 4 workers")
    assert hurt.wait() == 0, hurt.err
    assert compare(tmp_path / "calm", tmp_path / "hurt").startswith("identical: 8 steps")


EDITED = """
    import os, torch, unisono

    with unisono.Run(seed=3) as run:
        model = torch.nn.Linear(12, 1)
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        batch = 24 if os.environ["UNISONO_WORKER_ID"] in ("w0", "w1") else 12
        for step in run.steps(torch.ones(48, 12), batch_size=batch, microbatches=4, epochs=10**9):
            for x in step:
                step.backward(model(x).square().mean())
"""


def test_a_newcomer_with_another_recipe_is_refused_and_the_run_goes_on(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an edit of the script: its micro-batches would be others."""
    for variable, value in Faults().kill("w1", step=3, at="after_backward").environment().items():
        monkeypatch.setenv(variable, value)
    run_dir = tmp_path / "run"
    command = unisono("run", script(EDITED), "-n", 2, "--max-restarts", 1, "--run-dir", run_dir)
    command.line("another recipe than the run")
    assert command.line("batch_size ").split()[-3:] == ["batch_size", "24", "12"]
    command.line("generation 4 with 1 worker")
    assert unisono("stop", run_dir).wait() == 0
    assert command.wait() == 0, command.err
