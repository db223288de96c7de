"""A checkpoint that is written after a training loop, when the script has changed the state there: a run that resumes
from it repeats the code up to the call that saved, and has the same bits from there on.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono import StepError
from unisono.record.journal import read

BEST = unisono.Checkpoints(every_steps=1000, keep_best="val/rmse")
EPOCHS = 4


class Cut(Exception):
    """The end of a run that is resumed later."""


def train(directory: Path, kind: str, *, cut: bool = False, saves: bool = True) -> dict[str, Any]:
    """Train for some epochs; each changes the state after its loop, before the call that saves and after it."""
    policy = {"log": BEST, "plateau": BEST, "save": unisono.Checkpoints(every_steps=1000)}.get(kind)
    with unisono.Run(directory, seed=1, resume="auto", checkpoint=policy) as run:
        inputs = torch.randn(64, 4)
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if kind == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        counted = {"epochs": 0}
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, counted=counted)
        for epoch in range(EPOCHS):
            for step in run.steps(loader, microbatches=2):
                for x, y in step:
                    ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                if cut and epoch == EPOCHS - 1:
                    raise Cut
                if kind == "break" and step.index == 5:
                    break
            counted["epochs"] += 1
            squares = run.total("squares")
            for x, y in run.batches(loader):
                squares += ((model(x) - y) ** 2).sum()
            rmse = float((squares / 64) ** 0.5)
            scheduler.step(rmse) if kind == "plateau" else scheduler.step()
            if kind not in ("log", "plateau") and saves:
                run.save()
            run.log({"val/rmse": rmse})
            with torch.no_grad():
                model.bias += 0.01 * torch.rand(())
    assert counted["epochs"] == EPOCHS
    digests: dict[str, Any] = list(read(directory))[-1]["digests"]
    return digests


@pytest.mark.parametrize("kind", ["log", "plateau", "save", "no policy", "break"])
def test_a_run_resumes_with_the_state_that_was_saved_after_a_loop(kind: str, tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", kind)
    with pytest.raises(Cut):
        train(tmp_path / "cut", kind, cut=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")  # torch's, of a scheduler without an optimizer
        assert train(tmp_path / "cut", kind) == calm
    told = [[line.get(key) for key in ("kind", "step", "totals", "logs", "loss")] for line in read(tmp_path / "cut")]
    assert told == [
        [line.get(key) for key in ("kind", "step", "totals", "logs", "loss")] for line in read(tmp_path / "calm")
    ]


def test_a_script_that_does_not_come_to_the_call_again_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        train(tmp_path, "no policy", cut=True)
    with pytest.raises(StepError, match=r"must make the same calls"):
        train(tmp_path, "no policy", saves=False)
