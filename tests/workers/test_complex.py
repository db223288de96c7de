"""Models with complex parameters: the same bits alone and in a team, also when they go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.models import vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono import Checkpoints
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.rounds.finite import is_finite
from unisono.engine.state.packing import digest_of_state
from unisono.script.run import Run

WAYS: dict[str, dict[str, Any]] = {"plain": {}, "delay": {"delay": 1}}


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(12, 5, dtype=torch.complex64) / 4)
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return ((x.to(torch.complex64) @ self.narrow).abs() * self.wide.abs() + self.real).square().mean()


def _train(run: Run, way: str, steps: int) -> int:
    model = Spectral()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=steps, **WAYS[way]):
        for x, _ in step:
            step.backward(model(x))
        optimizer.step()
    return digest_of_state({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _member(seat: Seat, place: Place, way: str) -> int:
    with place.run(seed=1) as run:
        return _train(run, way, 3)


@pytest.mark.parametrize("way", WAYS)
def test_a_team_gives_the_bits_of_one_worker(way: str) -> None:
    with AloneRun(seed=1) as run:
        alone = _train(run, way, 3)
    assert set(train_on("shared", 2, _member, way)) == {alone}
    assert set(train_on("gloo", 3, _member, way)) == {alone}


def test_a_checkpoint_has_them(tmp_path: Path) -> None:
    with AloneRun(seed=1) as run:
        alone = _train(run, "plain", 3)
    with AloneRun(tmp_path / "run", seed=1, checkpoint=Checkpoints(every_steps=1)) as run:
        _train(run, "plain", 2)
    with AloneRun(tmp_path / "run", seed=1, checkpoint=Checkpoints(every_steps=1), resume="auto") as run:
        assert _train(run, "plain", 3) == alone


@pytest.mark.parametrize("value", [complex("nan"), complex(0, float("inf"))])
def test_a_complex_gradient_that_is_not_finite_is_seen(value: complex) -> None:
    layout = FlatLayout([("p", torch.zeros(9, dtype=torch.complex64))], [])
    slot = Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8))
    assert is_finite(slot, range(layout.tail_row))
    slot.gradients[0][4] = value
    assert not is_finite(slot, range(layout.tail_row))
