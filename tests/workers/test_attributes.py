"""What changes what a step computes and is in no ``state_dict`` travels with the state, or is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono
from tests.workers.models import vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import DivergenceError
from unisono.engine.state.tracked import Tracked

Change = Callable[[nn.Module, unisono.Step], object]
STEPS, CUT_AT = 6, 4


class Cut(Exception):
    """The end of a run that is resumed later."""


class Counting(torch.optim.SGD):
    """Counts its steps, in numbers and tensors that belong to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        self.state["sum"] = self.state.get("sum", torch.zeros(2)) + 1
        return super().step(closure)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh())


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(layers()), nn.Linear(8, 4))


def traced() -> nn.Module:
    return nn.Sequential(torch.jit.trace(layers()[:2], torch.ones(3, 12)), nn.Linear(8, 4))


def frozen() -> nn.Module:
    return nn.Sequential(torch.jit.freeze(torch.jit.script(layers().eval())), nn.Linear(8, 4))


def plain() -> nn.Module:
    return nn.Sequential(layers(), nn.Linear(8, 4))


def nothing(model: nn.Module, step: unisono.Step) -> None:
    pass


def train(
    run: unisono.Run,
    make: Callable[[], nn.Module],
    kind: type[torch.optim.SGD] = torch.optim.SGD,
    change: Change = nothing,
    *,
    cut: bool = False,
) -> dict[str, str]:
    """Train a model, and change something in each step; returns digests of what is tracked."""
    model = make()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=STEPS, epochs=9):
        if cut and step.number == CUT_AT:
            raise Cut
        change(model, step)
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return run._tracked.common_digests()


def train_at(seat: Seat, place: Place, *arguments: Any) -> dict[str, str]:
    with place.run(seed=3) as run:
        return train(run, *arguments)


def resumed(directory: Path, *arguments: Any) -> dict[str, str]:
    """Train with a run that is cut and resumed."""
    with pytest.raises(Cut), unisono.Run(directory, seed=3, device="cpu", checkpoint=EVERY) as run:
        train(run, *arguments, cut=True)
    with AloneRun(directory, seed=3, checkpoint=EVERY, resume="auto") as run:
        return train(run, *arguments)


EVERY = unisono.Checkpoints(every_steps=2)

PARTS = [(scripted, torch.optim.SGD), (traced, torch.optim.SGD), (frozen, torch.optim.SGD), (plain, Counting)]


def train_all(seat: Seat, place: Place) -> list[dict[str, str]]:
    return [train_at(seat, place, *part) for part in PARTS]


def test_modules_of_torchscript_and_optimizers_with_notes_of_their_own_train_and_resume(tmp_path: Path) -> None:
    (alone,) = train_on("shared", 1, train_all)
    assert train_on("shared", 2, train_all) == [alone, alone]
    assert [resumed(tmp_path / str(number), *part) for number, part in enumerate(PARTS)] == alone


def frozen_statistics(model: nn.Module, step: unisono.Step) -> None:
    """BatchNorm is frozen from some step on; what a micro-batch or an evaluation sets is put back."""
    if step.number == 2:
        model[0][1].eval()  # type: ignore[index, union-attr, operator]


def test_modes_travel_and_are_those_of_the_boundary(tmp_path: Path) -> None:
    with AloneRun(seed=3) as run:
        alone = train(run, plain, change=frozen_statistics)
    assert resumed(tmp_path, plain, torch.optim.SGD, frozen_statistics) == alone
    ours, theirs = Tracked(), Tracked()
    ours.add({"model": (mine := plain())})
    theirs.add({"model": (yours := plain())})
    yours[0][1].eval()  # type: ignore[index]
    mine[1].eval()  # type: ignore[index]
    of_old_version = theirs.whole_state()
    del of_old_version["in_eval"]
    ours.load(of_old_version)
    assert [name for name, one in mine.named_modules() if not one.training] == ["1"]
    ours.load(theirs.state())
    assert [name for name, one in mine.named_modules() if not one.training] == ["0.1"]


def eval_on_one(seat: Seat, place: Place) -> str:
    def change(model: nn.Module, step: unisono.Step) -> None:
        model.train(seat.rank == 0 or step.number < 1)

    with pytest.raises(DivergenceError) as caught, place.run(seed=3) as run:
        train(run, lambda: nn.Sequential(nn.Linear(12, 4), nn.Identity()), change=change)
    return str(caught.value)


def test_modes_that_differ_between_workers_are_named() -> None:
    first, _ = train_on("shared", 2, eval_on_one)
    assert "modes of modules['model'] is eval() on w1 and not there on w0" in first
