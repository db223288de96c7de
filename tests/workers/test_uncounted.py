"""Steps in which nothing counts: they have no gradient, change nothing, and the run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from tests.workers.models import bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.record.journal import read

EMPTY = (0, 2, 3)
"""The steps in which nothing counts; the second one is an epoch's last."""
STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def leave_out(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """In each way in which a script may have nothing to say of a micro-batch."""
    match step.number_in_loop:
        case 0:
            step.backward(F.cross_entropy(model(x * math.nan), y), weight=0)
        case 2:
            step.backward(torch.zeros(()), weight=torch.tensor(0))
        case _:
            step.backward(None, weight=0)


def train(run: Any, kind: str) -> list[Any]:
    """What the script sees after each step, and the bits of the model."""
    options: dict[str, Any] = {"delay": {"delay": 2}, "sum": {"reduction": "sum"}}.get(kind, {})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "scaler")
    with run:
        model: Any = Model()
        if kind == "stages":
            model = unisono.Stages(model.layers, cuts=1)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        if kind == "shard":
            optimizer = unisono.shard(optimizer)
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        run.track(scheduler=scheduler)

        def loss_of(x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(model(x), y), 0 if step.number in EMPTY else len(y)

        found: list[Any] = []
        for step in run.steps(vectors(), batch_size=24, microbatches=4, epochs=2, max_steps=STEPS, **options):
            if kind == "stages":
                step.compute(loss_of)
            else:
                for x, y in step:
                    if step.number in EMPTY:
                        leave_out(step, model, x, y)
                    else:
                        step.backward(F.cross_entropy(model(x), y), scaler=scaler)
                    step.add(seen=len(y))
            before = bits_of(model.state_dict())
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            is_same = bits_of(model.state_dict()) == before
            assert is_same == (not step.has_gradient) == math.isnan(step.loss) == (float(norm) == 0.0)
            assert is_same == all(parameter.grad is None for parameter in model.parameters())
            assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
            found.append((step.has_gradient, repr(step.loss), repr(run.loss), step.totals))
        return [*found, bits_of(model.state_dict())]


def train_in_place(seat: Seat, place: Place, kind: str) -> list[Any]:
    return train(place.run(seed=1), kind)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a scaler leaves out the first update
@pytest.mark.parametrize("kind", ["plain", "scaler", "delay", "sum", "shard", "stages"])
def test_such_a_step_changes_nothing_on_any_number_of_workers(kind: str, tmp_path: Path) -> None:
    alone = train(AloneRun(tmp_path, seed=1), kind)
    delay = 2 if kind == "delay" else 0
    expected = [*[False] * delay, *(number not in EMPTY for number in range(STEPS))]
    assert [one[0] for one in alone[:-1]] == expected
    lines = [line for line in read(tmp_path) if line["kind"] == "step"]
    assert [line["loss"] == "nan" for line in lines] == [number in EMPTY for number in range(STEPS)]
    assert [line["weight"] == 0 for line in lines] == [number in EMPTY for number in range(STEPS)]
    kinds = ("shared", "gloo") if kind == "plain" else ("shared",)
    for exchange in kinds:
        assert train_on(exchange, 2, train_in_place, kind) == [alone, alone]


def rounds(run: Any, delta: str, counts: Callable[[int, int], bool]) -> list[Any]:
    """Two replicas; which of them counts in which round."""
    with run:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
        run.track(model=model, optimizer=optimizer, outer=outer)
        found: list[Any] = []
        options = {"batch_size": 16, "microbatches": 4, "replicas": 2, "inner_steps": 2, "epochs": 2, "max_steps": 6}
        for round_ in run.local_steps(vectors(64), outer=outer, delta=delta, **options):
            before = bits_of(dict(model.named_parameters()))  # not the count of batches
            for step in round_:
                replica = int(step.name.partition("replica ")[2][0])
                for x, y in step:
                    weight = len(y) if counts(round_.number, replica) else 0
                    step.backward(F.cross_entropy(model(x), y), weight=weight)
                optimizer.step()
            is_same = bits_of(dict(model.named_parameters())) == before
            assert is_same == (not round_.has_gradient) == math.isnan(round_.loss)
            assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
            found.append((is_same, repr(round_.loss), repr(run.loss)))
        return [*found, bits_of(model.state_dict())]


def replica_counts(round_: int, replica: int) -> bool:
    return (round_ == 0 and replica == 1) or round_ == 2


def rounds_in_place(seat: Seat, place: Place, delta: str) -> list[Any]:
    return rounds(place.run(seed=1), delta, replica_counts)


@pytest.mark.parametrize("delta", ["fp32", "int8"])
def test_a_round_in_which_no_replica_counts_leaves_the_model(delta: str) -> None:
    alone = rounds(AloneRun(seed=1), delta, replica_counts)
    assert [one[0] for one in alone[:-1]] == [False, True, False]
    assert train_on("shared", 2, rounds_in_place, delta) == [alone, alone]
