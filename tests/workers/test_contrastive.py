"""A contrastive loss with the negatives of the whole batch: a pass for the features, and one for the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from tests.workers.models import vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.engine.state.packing import digest_of_tensor

BATCH = 24
WIDTH = 5


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))


def views(x: Tensor) -> Tensor:
    """Two of each sample: (2n, 12)."""
    return torch.cat([x, x + 0.1 * torch.randn(x.shape)])


def nt_xent(one: Tensor, other: Tensor) -> Tensor:
    """Of (n, width) and (n, width): the loss of SimCLR, with all others as negatives."""
    found = F.normalize(torch.cat([one, other]), dim=1)
    scores = found @ found.T / 0.5
    n = len(one)
    targets = torch.arange(2 * n).roll(n)
    return F.cross_entropy(scores.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9), targets)


def train(run: Any, microbatches: int) -> list[Any]:
    """By step: the loss, and the gradients."""
    with run:
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        features = unisono.Carried(torch.zeros(BATCH, 2, WIDTH))  # of a batch, by position
        run.track(model=model, optimizer=optimizer, features=features)
        found: list[Any] = []
        for step in run.steps(vectors(), batch_size=BATCH, microbatches=microbatches, epochs=2, max_steps=5):
            rows = torch.arange(BATCH).chunk(microbatches)
            for x, _ in step:
                with torch.no_grad():
                    one, other = model(views(x)).chunk(2)
                features[rows[step.microbatch][: len(x)]] = torch.stack([one, other], 1)
                step.backward(None, weight=0)
            assert not step.has_gradient
            for x, _ in step.again():
                one, other = model(views(x)).chunk(2)
                every = features.rows[: step.num_samples].clone()
                every[rows[step.microbatch][: len(x)]] = torch.stack([one, other], 1)
                loss = nt_xent(every[:, 0], every[:, 1])
                share = step.num_samples / len(x)
                step.backward(share * loss + (1 - share) * loss.detach())
            found.append((step.loss, step.result().loss, run.loss, [p.grad.clone() for p in model.parameters()]))
            optimizer.step()
        return found


def bits(found: list[Any]) -> list[Any]:
    return [(*numbers, [digest_of_tensor(one) for one in gradients]) for *numbers, gradients in found]


def train_in_place(seat: Seat, place: Place, microbatches: int) -> list[Any]:
    return bits(train(place.run(seed=1), microbatches))


def plain(microbatches: int) -> list[Any]:
    """The same with torch alone: the whole batch at once, with the draws of each micro-batch."""
    with AloneRun(seed=1) as run:
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model)
        found: list[Any] = []
        for step in run.steps(vectors(), batch_size=BATCH, microbatches=microbatches, epochs=2, max_steps=5):
            made: list[Tensor] = []
            for x, _ in step:
                made.append(model(views(x)))
                step.backward(None, weight=0)
            one, other = (torch.cat(part) for part in zip(*(each.chunk(2) for each in made), strict=True))
            loss = nt_xent(one, other)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            found.append((float(loss.detach()), list(gradients)))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return found


@pytest.mark.parametrize("microbatches", [1, 4])
def test_all_negatives_on_any_number_of_workers(microbatches: int) -> None:
    alone = train(AloneRun(seed=1), microbatches)
    for (loss, in_journal, _, gradients), (expected, of_torch) in zip(alone, plain(microbatches), strict=True):
        assert loss == in_journal == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradients, of_torch, rtol=0, atol=1e-6)
    assert train_on("shared", 2, train_in_place, microbatches) == [bits(alone)] * 2
