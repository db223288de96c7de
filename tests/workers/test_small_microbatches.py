"""A run whose micro-batches are too small says so once, with a number that would be better."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.workers.models import vectors
from tests.workers.static_team import AloneRun
from unisono.core import small


def _train(microbatches: int) -> None:
    with AloneRun(seed=1) as run:
        model = nn.Linear(vectors().tensors[0].shape[1], 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=microbatches, epochs=9, max_steps=20):
            for x, y in step:
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_small_micro_batches_are_told_once(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """At the line of the script."""
    monkeypatch.setattr(small, "MATTERS_S", 0.0)
    monkeypatch.setattr(small, "TOO_MUCH", 0.0)
    _train(1)
    assert not recwarn.list
    _train(8)
    (said,) = recwarn.list
    assert str(said.message).startswith("micro-batches are small: for each, Unisono's own work takes ")
    assert said.filename == __file__
