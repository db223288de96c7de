"""Modes on which bits depend (rounding, denormal numbers, precision, dtype): the same in all threads and workers."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.waiting import WAIT_S
from tests.workers.models import Mlp, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono import Checkpoints
from unisono.core.errors import RecipeError, StepError, UsageError
from unisono.engine.state.packing import digest_of_state
from unisono.script.modes import MEASURING, modes
from unisono.script.run import Run
from unisono.system.fingerprint import fingerprint, floating_point

TINY = 1e-39
"""Denormal in float32."""


def _rounds_up() -> None:
    assert ctypes.CDLL("libm.so.6").fesetround(0x800) == 0


def _flushes() -> None:
    assert torch.set_flush_denormal(True)


class Faint(nn.Module):
    """Its gradients are denormal numbers, which add up to others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), TINY))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs).sum()


def _epoch(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, in_step: Callable[[], object], **options: Any
) -> None:
    samples = TensorDataset(torch.linspace(1, 3, 24).view(24, 1))
    for step in run.steps(samples, microbatches=6, batch_size=12, **options):
        for (inputs,) in step:
            step.backward(model(inputs * TINY))
        optimizer.step()
        in_step()


def _train(
    seat: Seat | None,
    place: Place | None,
    first: Callable[[], object],
    between: Callable[[], object],
    in_step: Callable[[], object],
    options: dict[str, Any],
) -> int | str:
    """Set modes before the run, between two loops, in a step; returns the digest of the model, or the error."""
    first()
    with place.run() if place is not None else AloneRun() as run:
        model = Faint()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run.track(model=model, optimizer=optimizer)
        try:
            _epoch(run, model, optimizer, int, **options)
            between()
            _epoch(run, model, optimizer, in_step, **options)
        except (UsageError, StepError) as error:
            return str(error)
    return digest_of_state(model.state_dict())


def _train_alone(seat: Seat, place: Place, *arguments: Any) -> int | str:
    return _train(None, None, *arguments)


WHERE = [("alone", 1), ("shared", 2), ("gloo", 3)]


def _ends(
    first: Callable[[], object], between: Callable[[], object], in_step: Callable[[], object], **options: Any
) -> set[int | str]:
    found: set[int | str] = set()
    for kind, size in WHERE:
        body = _train_alone if kind == "alone" else _train
        found |= set(train_on("shared" if kind == "alone" else kind, size, body, first, between, in_step, options))
    return found


@pytest.mark.parametrize("options", [{}, pytest.param({"delay": 1}, marks=pytest.mark.more)], ids=["plain", "delay"])
@pytest.mark.parametrize("mode", [int, _flushes, _rounds_up])
def test_a_mode_that_is_set_before_the_run_is_that_of_all_threads(
    mode: Callable[[], object], options: dict[str, Any]
) -> None:
    (bits,) = _ends(mode, int, int, **options)
    assert isinstance(bits, int), bits


@pytest.mark.parametrize("mode", [_flushes, _rounds_up])
def test_a_mode_that_changes_after_the_run_has_begun_is_refused_everywhere(mode: Callable[[], object]) -> None:
    """Threads that add keep the mode that they were started with: with gloo other bits came out than alone."""
    (error,) = _ends(int, mode, int)
    assert "the floating-point mode of this thread has changed since the run began" in str(error)
    (error,) = _ends(int, int, mode)
    assert "the mode of this thread has changed in step 2" in str(error)


def _double() -> None:
    torch.set_default_dtype(torch.float64)


def _medium() -> None:
    torch.set_float32_matmul_precision("medium")


def _more_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


@pytest.mark.parametrize(
    ("mode", "name"), [(_double, "default dtype"), (_medium, "fp32_precision"), (_more_threads, "threads")]
)
def test_a_mode_of_the_process_changes_between_two_loops_and_not_within_one(
    mode: Callable[[], object], name: str
) -> None:
    """Whoever joins later gets to the code between loops, and not to that of steps that are done."""
    if mode is not _more_threads:  # in a fork of a process that has used torch's threads none can be started
        (bits,) = train_on("shared", 1, _train, int, mode, int, {})
        assert isinstance(bits, int), bits
    (error,) = train_on("shared", 1, _train, int, int, mode, {})
    assert name in str(error)
    assert "has changed in step 2" in str(error)


def _resumed(seat: Seat, place: Place, directory: str, mode: Callable[[], object], anyway: set[str]) -> str:
    for resume, first in (("", int), ("auto", mode)):
        first()
        policy = Checkpoints(every_steps=1)
        with AloneRun(directory, checkpoint=policy, resume=resume, resume_anyway=anyway if resume else ()) as run:
            model = Faint()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            run.track(model=model, optimizer=optimizer)
            try:
                _epoch(run, model, optimizer, int, epochs=2 if resume else 1)
            except RecipeError as error:
                return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:the run continues with a different recipe")
@pytest.mark.parametrize("mode", [_flushes, _medium])
def test_modes_are_part_of_the_recipe(mode: Callable[[], object], tmp_path: Path) -> None:
    """Which is compared with that of the other members, and with that of a checkpoint."""
    (refused,) = train_on("shared", 1, _resumed, str(tmp_path / "run"), mode, set())
    assert re.search(r"modes +- +\S", refused), refused
    (refused,) = train_on("shared", 1, _resumed, str(tmp_path / "other"), mode, {"modes"})
    assert refused == ""


STARTED_BEFORE = """
import torch
import unisono

torch.set_num_threads(2)
torch.ones(1 << 18).mul(2)  # the other thread starts
assert torch.set_flush_denormal(True)
run = unisono.Run(threads=2)
model = torch.nn.Linear(6, 1)
run.track(model=model)
for step in run.steps(torch.utils.data.TensorDataset(torch.ones(24, 6)), batch_size=24, microbatches=4):
    pass
"""


def test_threads_of_torch_that_were_started_in_another_mode_are_found(tmp_path: Path) -> None:
    """In a new process: in a fork of one that has used torch's threads none can be started."""
    script = tmp_path / "train.py"
    script.write_text(STARTED_BEFORE)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "some of them were started before the floating-point mode was set" in done.stderr


def _seen(seat: Seat, place: Place) -> list[str]:
    found = [floating_point(), fingerprint("cpu").get("floating point", "")]
    _flushes()
    found.append(fingerprint("cpu")["floating point"])
    torch.set_flush_denormal(False)
    for direction in (0x400, 0x800, 0xC00):
        assert ctypes.CDLL("libm.so.6").fesetround(direction) == 0
        found.append(floating_point())
    return found


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="the numbers are those of x86")
def test_the_mode_is_part_of_the_fingerprint() -> None:
    flushed = "to nearest, denormal results are flushed to 0, denormal inputs count as 0"
    assert train_on("shared", 1, _seen) == [["to nearest", "", flushed, "rounds down", "rounds up", "rounds to zero"]]


def _autocast(around: bool) -> int:
    with AloneRun(seed=1) as run:
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run.track(model=model, optimizer=optimizer)
        with torch.autocast("cpu", enabled=around):
            for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=3):
                for x, y in step:
                    with torch.autocast("cpu"):
                        loss = F.cross_entropy(model(x), y)
                    step.backward(loss)
                optimizer.step()
    return digest_of_state(model.state_dict())


def test_autocast_around_the_loop_computes_with_the_weights_of_the_step() -> None:
    """Torch keeps what it has cast until the outermost autocast ends; a worker that joins later would not have it."""
    assert _autocast(around=True) == _autocast(around=False)


def _compiled(seat: Seat, place: Place, *, is_old: bool) -> str:
    """Train with what measures kernels; in a version of torch that has no deterministic mode for it, ``is_old``."""
    with place.run() as run:
        model = Faint()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run.track(model=model, optimizer=optimizer)
        torch.compile(model, mode="max-autotune")
        options: Any = importlib.import_module("torch._inductor.config")
        options.deterministic = options.deterministic and not is_old
        try:
            _epoch(run, model, optimizer, int)
        except UsageError as error:
            return str(error)
        return modes()[MEASURING]


def test_kernels_that_are_chosen_by_measuring_are_refused_on_several_workers() -> None:
    assert train_on("shared", 2, partial(_compiled, is_old=False)) == ["none", "none"]
    for error in train_on("shared", 2, partial(_compiled, is_old=True)):
        assert error.startswith("torch.compile chooses kernels by measuring (max_autotune, coordinate_descent_tuning)")
    assert train_on("shared", 1, partial(_compiled, is_old=True)) == ["max_autotune, coordinate_descent_tuning"]
