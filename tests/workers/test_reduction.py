"""With ``reduction="sum"`` the gradient of a step is that of the sum of its losses, and `step.loss` is that sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.workers.models import Mlp, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.script.run import Run

SEED = 3
EXACT = 1e-10


class Normed(Mlp):
    """With running statistics, which are a mean over the samples whatever the losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def train(run: Run, *, scale: float | None = None) -> tuple[list[float], list[str], Normed]:
    """The losses and digests of the steps; an epoch ends with a partial batch (56 = 24 + 24 + 8)."""
    losses, digests = [], []
    with run:
        model = Normed().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for step in run.steps(
            vectors(dtype=torch.float64), batch_size=24, microbatches=4, epochs=2, shuffle=False, reduction="sum"
        ):
            for x, y in step:
                loss = F.cross_entropy(model(x), y, reduction="sum")
                if step.number % 2:
                    loss.backward()
                else:
                    step.backward(loss, weight=len(y), scaler=scaler)
            if scale is not None and step.number % 2 == 0:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= scale
            optimizer.step()
            losses.append(step.loss)
            digests.append(step.result().digest)
    return losses, digests, model


def train_plainly(losses: list[float]) -> Normed:
    """The same training as a plain loop, whose losses must be these."""
    with AloneRun(seed=SEED):
        model = Normed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    x, y = vectors(dtype=torch.float64).tensors
    running = [buffer for buffer in model.norm.buffers() if buffer.dim() == 1]  # mean and variance
    for number, loss in enumerate(losses):
        first = number % 3 * 24
        leaves = torch.arange(first, min(first + 24, 56)).split(6)
        optimizer.zero_grad()
        total, sums, before = 0.0, torch.zeros(2, 12, dtype=torch.float64), torch.stack(running)
        for leaf in leaves:
            own = F.cross_entropy(model(x[leaf]), y[leaf], reduction="sum")
            own.backward()
            total += own.item()
            sums += len(leaf) * torch.stack(running)
            for buffer, value in zip(running, before, strict=True):
                buffer.copy_(value)
        optimizer.step()
        for buffer, value in zip(running, sums / sum(map(len, leaves)), strict=True):
            buffer.copy_(value)
        assert loss == pytest.approx(total, rel=0, abs=EXACT)
    return model


@pytest.mark.filterwarnings("error")
def test_it_is_a_plain_loop_over_the_sum() -> None:
    losses, _, model = train(AloneRun(seed=SEED))
    assert len(losses) == 6
    reference = train_plainly(losses).state_dict()
    for name, value in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(value, reference[name], rtol=0, atol=EXACT)


def _train(seat: Seat, place: Place) -> tuple[list[float], list[str]]:
    return train(place.run(seed=SEED))[:2]


def test_it_gives_the_same_bits_on_workers() -> None:
    expected = train(AloneRun(seed=SEED))[:2]
    assert train_on("shared", 3, _train) == [expected] * 3


def test_a_scale_changes_no_bit_of_the_loss() -> None:
    assert train(AloneRun(seed=SEED), scale=1024.0)[0] == train(AloneRun(seed=SEED))[0]
