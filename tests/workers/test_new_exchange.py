"""A new exchange is a file and a row of the table; then a script trains over it, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import Place, train_on
from tests.workers.store_exchange import StoreExchange
from unisono.training.connect import EXCHANGES


def _train(seat: Seat, place: Place) -> Any:
    with place.run(seed=1) as run:
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=9, max_steps=6):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y), weight=len(y))
            optimizer.step()
        totals = run.evaluate(vectors(), lambda batch: {"sum": model(batch[0]).sum()}, batch_size=7)
    return bits_of(model.state_dict()), totals


def test_a_training_over_a_new_exchange_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCHANGES, "store", StoreExchange)
    right = train_on("shared", 2, _train)[0]
    assert train_on("store", 3, _train) == [right] * 3
