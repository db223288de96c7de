"""A worker that computes for ever: who is told, who is ended, and what becomes of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]
Script = Callable[..., str]

ONE_SAMPLE_NEVER_COMES = """
    import threading
    import torch
    import unisono
    from torch import nn

    class Data:
        def __len__(self):
            return 48

        def __getitem__(self, index):
            if index == 31:  # of step 1: in its first step a worker may take its time
                threading.Event().wait()
            return torch.full((3,), index / 48)

    with unisono.Run(seed=3) as run:
        model = nn.Linear(3, 1)
        run.track(model=model)
        for step in run.steps(Data(), batch_size=24, microbatches=8, shuffle=False):
            for inputs in step:
                step.backward(model(inputs).mean())
    """


def test_a_sample_that_never_comes_ends_the_run_by_name(unisono: Unisono, script: Script) -> None:
    """The first worker is left aside, the second gets its micro-batch and hangs as well; nobody else holds the state,
    and only a newcomer waits.
    """
    name = script(ONE_SAMPLE_NEVER_COMES)
    limits = (
        "--set",
        "report-late-after=0.4s",
        "--set",
        "go-on-without-after=3s",
        "--set",
        "kill-after=6s",
        "--set",
        "heartbeat=0.1s",
        "--set",
        f"heartbeat-timeout={WAIT_S}s",
    )
    command = unisono("run", name, "--workers", 2, *limits)
    assert command.wait() == 1
    told = command.err
    place = "step 1, micro-batch 2 (samples 30, 31, 32)"
    assert len([line for line in told if "is late: no progress" in line and place in line]) == 2, told
    assert {line.partition(" ")[0] for line in told if "in __getitem__" in line and "train.py" in line} == {
        "[w0]",
        "[w1]",
    }, "their stacks"
    assert " unisono: failed: worker w" in told[-1]
    assert f"at {place}, where worker w" in told[-1]


EXPORTS_AT_THE_END = """
    import os
    import time
    import torch
    import unisono
    from torch import nn

    with unisono.Run("run", seed=3) as run:
        model = nn.Linear(1, 1)
        run.track(model=model)
        for step in run.steps(torch.arange(24.0), batch_size=12, microbatches=2, epochs=2):
            for inputs in step:
                step.backward(model(inputs[:, None]).mean())
        if run.is_main:
            while not os.path.exists("go"):
                time.sleep(0.01)
            torch.save(model.state_dict(), "export.pt")
    """


def test_an_export_of_the_main_worker_after_the_loop_may_take_longer_than_a_step(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    """The other worker waits at the end of the run; nobody is left aside, or ended, for that."""
    limits = (
        "--set",
        "go-on-without-after=3s",
        "--set",
        "report-late-after=4s",
        "--set",
        "heartbeat=0.1s",
        "--set",
        f"heartbeat-timeout={WAIT_S}s",
    )
    command = unisono("run", script(EXPORTS_AT_THE_END), "--workers", 2, *limits)
    command.line("is late: no progress")
    (tmp_path / "go").touch()
    assert command.wait() == 0, command.err
    assert (tmp_path / "export.pt").exists()
    assert not [line for line in command.err if "left aside" in line]
