"""A script that leaves its training loop before the end: all workers at the same step, or one of them alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from tests.workers.conftest import Command, Unisono
from tests.workers.static_team import AloneRun
from unisono import Run
from unisono.record.history import History
from unisono.record.journal import read

pytestmark = pytest.mark.usefixtures("nursery")
Script = Callable[..., str]

TRAINING = """
    import os
    import sys
    import time
    import torch
    import unisono
    from unisono.cluster.worker import member
    from torch import nn

    how, who = sys.argv[1:3]
    me = member.current().worker_id

    def train():
        with unisono.Run("run", seed=3) as run:
            data = torch.arange(48.0)
            model = nn.Linear(1, 1)
            run.track(model=model)
            for step in run.steps(data, batch_size=24, microbatches=4, epochs=5):
                if step.number == 3 and how == "break before" and who in (me, "all"):
                    break
                for inputs in step:
                    if step.number == 2 and how == "sys.exit inside" and who in (me, "all"):
                        sys.exit(0)
                    step.backward(model(inputs[:, None]).mean())
                if step.number != 2 or who not in (me, "all"):
                    continue
                print("leaves the loop", flush=True)
                while me == "w1" and who == "all" and not os.path.exists("go"):
                    time.sleep(0.01)
                if how in ("break after", "break for another"):
                    break
                if how == "return":
                    return
                if how == "sys.exit":
                    sys.exit(0)
            if how == "sys.exit behind":
                sys.exit(0)
            if how == "break for another":
                for step in run.steps(data, batch_size=24, microbatches=4, max_steps=1):
                    for inputs in step:
                        step.backward(model(inputs[:, None]).mean())

    train()
    """


def start(unisono: Unisono, script: Script, how: str, who: str) -> Command:
    return unisono("run", script(TRAINING), "--workers", 3, "--set", "heartbeat=0.1s", "--", how, who)


@pytest.mark.parametrize("how", ["break after", "break before", "break for another", "return"])
def test_a_break_of_one_worker_ends_the_run_in_a_sentence_about_the_script(
    how: str, unisono: Unisono, script: Script
) -> None:
    """How many steps a training has is part of its result: nobody can say which of the workers is right."""
    command = start(unisono, script, how, "w1")
    assert command.wait() == 1
    pattern = (
        r"unisono: failed: worker w1 \(pid \d+\) left the training loop before step 3 \(by a break or a return "
        r"that only it reached\?\), but worker w[02] \(pid \d+\) has begun step 3\. All workers must leave"
    )
    assert re.search(pattern, command.err[-1]), command.err
    assert not [line for line in command.err if "trying again" in line]


@pytest.mark.parametrize(
    "how", ["break after", "break before", "break for another", "return", "sys.exit", "sys.exit behind"]
)
def test_all_workers_may_leave_at_the_same_step_and_one_of_them_later(
    how: str, unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    command = start(unisono, script, how, "all")
    for worker_id in ("w0", "w1", "w2"):
        command.line(f"[{worker_id}] leaves the loop")
    (tmp_path / "go").touch()
    assert command.wait() == 0, command.err
    num_steps = {"break for another": 4, "sys.exit behind": 10}.get(how, 3)
    steps = [*range(num_steps)]
    said = "unisono: the script ended within a training loop (SystemExit: 0) after 3 of 10 steps"
    assert [said in line for line in command.err].count(True) == (how == "sys.exit")
    *_, last = read(tmp_path / "run")
    assert (last["kind"], last["ok"]) == ("end", True)
    assert f" unisono: finished: {len(steps)} steps in " in command.out[-1]
    assert [line["step"] for line in read(tmp_path / "run") if line["kind"] == "step"] == steps


def test_a_worker_whose_script_exits_in_the_middle_is_reported_and_replaced(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    """As one whose process ends without a word: an exit code of 0 says nothing about the others."""
    command = start(unisono, script, "sys.exit", "w1")
    assert command.wait() == 0, command.err
    told = command.line("left the training loop at step 2 and ended with exit code 0")
    assert "worker w3 replaces it now (restart 1 of 10)" in told
    assert not [line for line in command.err if "trying again" in line]
    assert History(tmp_path / "run").status()["state"] == "finished"


@pytest.mark.parametrize("who", ["w1", "all"])
def test_an_exit_within_the_inner_loop_is_an_error_of_its_micro_batch(
    who: str, unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    """The others go on without the worker that has called it; where all call it, the run fails, as it does alone."""
    command = start(unisono, script, "sys.exit inside", who)
    assert command.wait() == (who == "all"), command.err
    command.line("sys.exit(0) was called within the inner loop of step 2")
    assert History(tmp_path / "run").status()["state"] == ("failed" if who == "all" else "finished")


# -- a script that trains without the run ------------------------------------------------------------

FITS = """
    import torch, unisono
    from torch import nn

    run = unisono.Run("run", seed=3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    """
ALONE = "run.track was called, but the script took no step of run.steps"


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_have_each_trained_by_themselves_have_failed(
    workers: int, unisono: Unisono, script: Script
) -> None:
    command = unisono("run", script(FITS), "--workers", workers)
    assert command.wait() == (workers > 1), command.err
    command.line(f"{ALONE}: each of the 2 workers has trained by itself" if workers > 1 else f"{ALONE}. The fit() of")


def fit(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()


def step(run: Run, model: nn.Module) -> None:
    run.track(model=model)
    for one in run.steps(torch.ones(4, 2), batch_size=4, microbatches=1):
        for batch in one:
            one.backward(model(batch).mean())


USES: dict[str, tuple[Callable[[Run, nn.Module], object], str]] = {
    "track and fit": (lambda run, model: (run.track(model=model), fit(model)), ALONE),
    "fit": (lambda run, model: fit(model), "a model was trained, but the script took no step of run.steps"),
    "track": (lambda run, model: run.track(model=model), ""),
    "broadcast": (lambda run, model: (fit(model), run.broadcast(3)), ""),
    "fit, then steps": (lambda run, model: (fit(model), step(run, model)), ""),
    "steps, then fit": (lambda run, model: (step(run, model), fit(model)), ""),
    "evaluate": (lambda run, model: (run.track(model=model), fit(model), list(run.batches([1, 2], batch_size=1))), ""),
}


@pytest.mark.parametrize("use", USES)
def test_a_script_alone_is_told_that_it_has_trained_without_the_run(
    use: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations, and values that are sent around, need no step."""
    uses, told = USES[use]
    with AloneRun(seed=1) as run:
        uses(run, nn.Linear(2, 1))
    assert capsys.readouterr().err.strip().partition(". The fit()")[0] == (told and f"unisono: {told}")
    assert not optimizers._global_optimizer_post_hooks
