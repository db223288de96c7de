"""Evaluation beside the training: the same totals, whoever computes them, and a training that does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.workers.models import Cnn, Images, bits_of
from tests.workers.processes import Seat
from tests.workers.static_team import Place, train_on


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _totals(seat: Seat, place: Place, wait: bool, asks: bool) -> dict[str, Any]:
    """Train three steps, evaluate after each, and ask for the result a step later."""
    found = []
    with place.run(seed=5) as run:
        model = Cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def count(batch: Any) -> dict[str, Any]:
            x, y = batch
            scores = model(x)
            return {"right": (scores.argmax(1) == y).sum(), "loss": F.cross_entropy(scores, y, reduction="sum")}

        for step in run.steps(Images(), batch_size=8, microbatches=4, max_steps=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if asks:
                found += [evaluation.result() for evaluation in run.pending]
            if wait:
                found.append(run.evaluate(Images(), count, batch_size=5))
            else:
                run.evaluate(Images(), count, batch_size=5, wait=False)
                assert run.pending[-1].step == step.place
        if asks:
            found += [evaluation.result() for evaluation in run.pending]
            assert run.pending == []
        drawn = torch.rand(3)
    return {"totals": bits_of(found), "model": bits_of(model.state_dict()), "drawn": bits_of(drawn)}


@pytest.mark.parametrize("size", [1, 3])
def test_without_an_evaluator_the_members_compute_it_at_once(size: int) -> None:
    (first,) = train_on("shared", 1, _totals, True, True)
    by_rank = train_on("shared", size, _totals, False, True)
    assert {each["totals"] for each in by_rank} == {first["totals"]}
    assert {each["model"] for each in by_rank} == {first["model"]}
    assert len({each["drawn"] for each in by_rank}) == 1
