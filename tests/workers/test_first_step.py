"""``run.steps(first_step=N)``: a new run goes on from a snapshot of the script's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono
from tests.workers.models import vectors
from unisono.record.journal import JOURNAL, read

STEPS = 7


def train(directory: Path, snapshot: dict[str, Any] | None = None, first_step: int = 0) -> list[dict[str, Any]]:
    """Train for two epochs of four steps, but the last; return snapshots of before each step.

    Args:
        snapshot: loaded before the training, as it was before the first step.
    """
    snapshots = []
    with unisono.Run(directory, seed=3) as run:
        model = nn.Sequential(nn.Linear(12, 33), nn.Dropout(0.2), nn.Linear(33, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if snapshot is not None:
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
        run.track(model=model, optimizer=optimizer)
        data = vectors(54)
        steps = run.steps(data, batch_size=16, microbatches=4, epochs=2, max_steps=STEPS, first_step=first_step)
        for step in steps:
            snapshots.append(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    return snapshots


def steps_of(directory: Path) -> list[dict[str, Any]]:
    names = ("step", "epoch", "loss", "samples", "digest")
    return [{name: line[name] for name in names} for line in read(directory / JOURNAL) if line["kind"] == "step"]


def end_of(directory: Path) -> Any:
    return [line["digests"] for line in read(directory / JOURNAL) if line["kind"] == "end"]


def test_a_snapshot_goes_on_with_the_bits_of_a_run_that_has_done_all_steps(tmp_path: Path) -> None:
    snapshots = train(tmp_path / "whole")
    train(tmp_path / "rest", snapshots[5], first_step=5)
    assert len(snapshots) == STEPS
    assert steps_of(tmp_path / "rest") == steps_of(tmp_path / "whole")[5:]
    assert end_of(tmp_path / "rest") == end_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"first_step": 9}, "from 0 to the 8 steps"),
        ({"first_step": -1}, "from 0 to the 8 steps"),
        ({"first_step": True}, "whole number"),
        ({"first_step": 2, "delay": 1}, "still in flight"),
    ],
)
def test_a_first_step_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with unisono.Run() as run:
        run.track(model=nn.Linear(12, 4))
        with pytest.raises(unisono.UsageError, match=words):
            run.steps(vectors(64), batch_size=16, microbatches=4, epochs=2, **arguments)


def test_only_the_first_training_loop_of_a_run_may_begin_later() -> None:
    with unisono.Run() as run:
        run.track(model=nn.Linear(12, 4))
        run.steps(vectors(64), batch_size=16, microbatches=4)
        with pytest.raises(unisono.UsageError, match="not the first training loop"):
            run.steps(vectors(64), batch_size=16, microbatches=4, first_step=1)
