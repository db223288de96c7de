"""``step.add``: sums over the micro-batches of a step are exact, equal on all workers, and there on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.waiting import WAIT_S
from tests.workers.models import Mlp, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import StepError, UsageError
from unisono.engine.loop.step import Step
from unisono.script.run import Run
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more

SIZE, M = 24, 6


def add(step: Step, x: Tensor, y: Tensor) -> None:
    """Integers, floats, flags, a tensor; a name that only some micro-batches of some steps bring, late."""
    step.add(seen=len(y), x=x.sum(), first=y[0] == 0)
    step.add(classes=F.one_hot(y, 4).sum(0), seen=1)
    if step.number == 2 and step.microbatch == 4:
        step.add(late=0.1)


def train(run: Run) -> list[Any]:
    """The totals of every step and of every epoch so far; five steps of two epochs."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, epochs=2, max_steps=5):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
            add(step, x, y)
        optimizer.step()
        found.append((plain(step.totals), plain(run.totals)))
    return found


def plain(totals: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in totals.items()}


def train_in_place(seat: Seat, place: Place) -> list[Any]:
    with place.run(seed=1) as run:
        return train(run)


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    with AloneRun(seed=1) as run:
        return train(run)


@pytest.mark.parametrize("kind", ["shared", "gloo", "two-level"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_totals_have_the_same_bits_at_any_number_of_workers(kind: str, size: int, alone: list[Any]) -> None:
    """Eight workers have six micro-batches: two workers compute nothing, and have the totals as well."""
    assert train_on(kind, size, train_in_place) == [alone] * size


def test_totals_are_those_of_the_global_batch(alone: list[Any]) -> None:
    first, second = alone[0][0], alone[1][0]
    assert first["seen"] == second["seen"] == SIZE + M
    assert sum(first["classes"]) == SIZE
    assert isinstance(first["seen"], int)
    assert isinstance(first["x"], float)
    assert 0 <= first["first"] <= M


def test_totals_over_an_epoch_are_the_sums_of_its_steps(alone: list[Any]) -> None:
    """56 samples are three steps: 24, 24 and 8 samples, of which the last ones have two micro-batches."""
    by_step, by_epoch = [totals["seen"] for totals, _ in alone], [totals["seen"] for _, totals in alone]
    assert by_step == [30, 30, 10, 30, 30]
    assert by_epoch == [30, 60, 70, 30, 60]


def test_a_name_that_comes_late_is_zero_afterwards(alone: list[Any]) -> None:
    """Its first step has two micro-batches of six, so nothing has added to it until the next epoch."""
    assert ["late" in totals for totals, _ in alone] == [False] * 5


def test_a_late_name_counts_from_its_first_step_on() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        found = []
        for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, epochs=2, max_steps=5):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                if step.number in (1, 4) and step.microbatch == 3:
                    step.add(late=0.1 * step.number)
            found.append((step.totals, run.totals))
    assert found[0] == ({}, {})
    assert found[1] == ({"late": 0.1}, {"late": 0.1})
    assert found[2] == ({"late": 0}, {"late": 0.1})
    assert found[3] == ({"late": 0}, {"late": 0})
    assert found[4] == ({"late": 0.4}, {"late": 0.4})


def test_an_integer_that_becomes_a_fraction_is_summed_in_float64() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        found = []
        for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, max_steps=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                step.add(value=1 if step.number != 1 else 0.5)
            found.append(step.totals["value"])
    assert found == [6, 3.0, 2.0]
    assert [type(value) for value in found] == [int, float, float]


def test_a_tensor_that_the_script_fills_again_counts_as_it_was_when_it_was_added() -> None:
    """The name is new in the first step, whose values are kept until all micro-batches are done."""
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        classes, found, expected = torch.zeros(4, dtype=torch.int64), [], []
        for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, max_steps=2):
            truth = torch.zeros(4, dtype=torch.int64)
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                classes.zero_()
                step.add(classes=classes.add_(torch.bincount(y, minlength=4)))
                truth += classes
            found.append(step.totals["classes"].tolist())
            expected.append(truth.tolist())
    assert found == expected


def _added(**values: Any) -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, max_steps=2):
            for index, (x, y) in enumerate(step):
                step.backward(F.cross_entropy(model(x), y))
                step.add(**{name: value(step, index) for name, value in values.items()})


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(UsageError, match="'name' is a str"):
        _added(name=lambda step, index: "seven")
    with pytest.raises(UsageError, match="'name' is a Tensor"):
        _added(name=lambda step, index: torch.ones(2, dtype=torch.complex64))
    with pytest.raises(StepError, match=r"step.add\(name=...\) got a tensor of shape \(3,\) in micro-batch 1"):
        _added(name=lambda step, index: torch.ones(3 if index == 1 else 2))
    with pytest.raises(StepError, match=r"shape \(2,\) in micro-batch 0, and one of shape \(1,\) before"):
        _added(name=lambda step, index: torch.ones(step.number + 1))


def test_sums_belong_into_the_inner_loop_and_totals_behind_it() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, max_steps=1):
            with pytest.raises(StepError, match=r"step.add was called outside of the inner loop"):
                step.add(seen=1)
            with pytest.raises(StepError, match=r"step.totals of step 0 are known only after the inner loop"):
                step.totals  # noqa: B018
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            assert step.totals == {}


def test_the_loss_of_a_run_is_the_mean_over_the_epoch_so_far() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        assert run.loss != run.loss  # NaN: no step is done
        found, weighted, seen = [], 0.0, 0
        for step in run.steps(vectors(), batch_size=SIZE, microbatches=M, epochs=2, max_steps=5):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            weighted, seen = (0.0, 0) if step.index == 0 else (weighted, seen)
            weighted, seen = weighted + step.num_samples * step.loss, seen + step.num_samples
            found.append(run.loss == weighted / seen)
    assert found == [True] * 5


FIRST_ONLY = """
import torch, unisono

run = unisono.Run(seed=1)
model = torch.nn.Linear(2, 1)
run.track(model=model)
for step in run.steps([torch.ones(2)] * 16, batch_size=8, microbatches=4):
    for x in step:
        model(x).mean().backward()
        if step.microbatch == 0:
            step.add(first=1)
"""


@pytest.mark.usefixtures("nursery")
def test_a_micro_batch_that_adds_nothing_may_be_computed_again_for_the_sums(tmp_path: Path) -> None:
    """Its worker is lost after the gradient's commit, in the step that brings the name."""
    script = tmp_path / "train.py"
    script.write_text(FIRST_ONLY)
    faults = Faults().kill("w1", at="in_sums")
    outcome = run_workers(script, 2, directory=tmp_path / "run", faults=faults, timeout_s=WAIT_S)
    assert outcome.exit_code == 0, outcome.output
    assert [line["totals"] for line in outcome.lines if line["kind"] == "step"] == [{"first": 1}] * 2
