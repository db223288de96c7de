"""A gradient that is not finite: who looks where, what is named, and that no bit changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.rounds.finite import PARTS, Finiteness, NotFinite, is_finite, looked_at

pytestmark = pytest.mark.more


def slot_of(*shapes: tuple[int, ...]) -> Slot:
    named = [(f"p{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]
    layout = FlatLayout(named, [], [], means=True)
    return Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8))


def is_broken(finiteness: Finiteness, slot: Slot, step: int) -> bool:
    here = (range(slot.layout.tail_row),)
    return finiteness.is_broken(slot, step, [float(one) for one in finiteness.sums_of(slot, step, here)], here)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_seen(value: float) -> None:
    slot = slot_of((7, 5), (3,))
    finiteness = Finiteness(lambda found: None)
    assert not is_broken(finiteness, slot, 0)
    slot.gradients[0][6, 4] = value
    assert is_broken(finiteness, slot, 0)


def test_a_sum_that_overflows_over_the_values_is_not_taken_for_one_of_them() -> None:
    slot = slot_of((4,))
    slot.gradients[0].fill_(3e38)
    assert is_finite(slot, range(slot.layout.tail_row))


def test_of_a_large_sum_the_parameters_farthest_from_the_loss_are_looked_at_in_each_step() -> None:
    slot = slot_of((100,), (1000, 1000), (100,))
    slot.gradients[0][3] = math.nan
    for step in range(PARTS):
        assert is_broken(Finiteness(lambda found: None), slot, step)


def test_of_a_large_sum_everything_is_looked_at_within_some_steps() -> None:
    layout = slot_of((1000, 1000), (777,)).layout
    here = (range(layout.tail_row),)
    seen = {row for step in range(PARTS) for rows in looked_at(layout, step, here) for row in rows}
    assert seen == set(range(layout.tail_row))
    assert all(sum(map(len, looked_at(layout, step, here))) < layout.tail_row / 4 for step in range(PARTS))


class Data:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index / 48)


def train(folder: Path | None, bad: int | None, *, scaler: Any = None) -> tuple[list[float], list[Any]]:
    """The losses, and the events; micro-batches with sample ``bad`` have a finite loss and no finite gradient."""
    seen: list[Any] = []

    class Sink:
        def emit(self, event: Any) -> None:
            seen.append(event)

        def close(self) -> None:
            pass

    losses = []
    with unisono.Run(folder, seed=3, sinks=[Sink()]) as run:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer, **({"scaler": scaler} if scaler is not None else {}))
        for step in run.steps(Data(), batch_size=24, microbatches=8, shuffle=False, epochs=3):
            for inputs in step:
                out = model(inputs)
                loss = out.mean()
                if bad is not None and bad in step.indices.tolist():
                    loss = loss + torch.sqrt((out * 0).sum())
                step.add(seen=len(inputs))
                step.backward(loss, scaler=scaler)
            assert step.totals == {"seen": 24}, "what is computed again does not count"
            if bad is None or step.number % 2 == 0:
                optimizer.step()
            losses.append(step.loss)
    return losses, [event for event in seen if isinstance(event, unisono.core.events.Problem)]


def test_it_is_said_once_with_the_first_micro_batch_and_its_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, (problem,) = train(tmp_path / "run", 31)
    assert problem.problem == "nan"
    assert problem.step == 1
    assert problem.text.startswith(
        "the gradient is not finite in step 1, micro-batch 2 (samples 30, 31, 32); its loss is"
    )
    assert not problem.ends_run
    assert capfd.readouterr().err.count("the gradient is not finite") == 1


def test_nothing_is_said_of_gradients_that_a_loss_scaler_expects_to_overflow(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert train(None, 31, scaler=scaler)[1] == []


def test_the_losses_are_those_of_a_run_that_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = train(None, 31)
    monkeypatch.setattr(Finiteness, "is_broken", lambda *_: False)
    assert train(None, 31) == (looked[0], [])


def test_a_good_run_says_nothing() -> None:
    assert train(None, None)[1] == []


def test_what_was_found_is_reported_once() -> None:
    found: list[NotFinite] = []
    finiteness, slot = Finiteness(found.append), slot_of((4,))
    slot.gradients[0].fill_(math.nan)
    assert is_broken(finiteness, slot, 0)
    finiteness.report(NotFinite(step=0, microbatch=1))
    assert not is_broken(finiteness, slot, 1)
    assert len(found) == 1
