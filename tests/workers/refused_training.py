"""Trainings with a model in stages that go wrong in one place: ``unisono run refused_training.py -- NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

DATA = TensorDataset(torch.arange(24.0 * 6).view(24, 6).sin(), torch.arange(24) % 3)


class Training:
    def __init__(self, run: unisono.Run, *, middle: nn.Module | None = None, cuts: int = 3) -> None:
        self.run = run
        self.model = unisono.Stages(nn.Linear(6, 6), middle or nn.Tanh(), nn.Linear(6, 3), cuts=cuts)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def track(self, **others: Any) -> None:
        self.run.track(model=self.model, optimizer=self.optimizer, **others)

    def steps(self, **options: Any) -> Iterator[unisono.Step]:
        return self.run.steps(DATA, **{"batch_size": 12, "microbatches": 4, "epochs": 2, **options})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def train(self, loss_of: Callable[..., Any] | None = None, **options: Any) -> None:
        for step in self.steps(**options):
            step.compute(loss_of or self.loss)
            self.optimizer.step()


class Odd(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


def no_stages(run: unisono.Run) -> None:
    training = Training(run)
    run.track(model=nn.Linear(6, 3))
    training.train()


def two_models(run: unisono.Run) -> None:
    training = Training(run)
    training.track(other=unisono.Stages(nn.Linear(2, 2), nn.Linear(2, 2), cuts=2))
    training.train()


def torchscript(run: unisono.Run) -> None:
    training = Training(run, middle=torch.jit.script(nn.Linear(6, 6)))
    training.track()
    training.train()


def outside_of_stages(run: unisono.Run) -> None:
    training = Training(run)
    training.track(head=nn.Linear(3, 3))
    training.train()


def more_parts(run: unisono.Run) -> None:
    Training(run, cuts=1)


def in_no_stages(run: unisono.Run) -> None:
    run.track(model=unisono.parallelize(nn.Sequential(nn.Linear(6, 4)), {"0": "columns"}, shards=2))
    Training(run).train()


def in_shards(run: unisono.Run) -> None:
    """Between two stages a tensor is in shards."""
    middle = unisono.parallelize(nn.Sequential(nn.Linear(6, 6)), {"0": "columns"}, shards=2)
    training = Training(run, middle=middle)
    training.track()
    training.train()


def few_shards(run: unisono.Run) -> None:
    training = Training(
        run, middle=unisono.parallelize(nn.Sequential(nn.Linear(6, 6)), {"0": "rows"}, shards=2), cuts=1
    )
    training.track()
    training.train()


def plain_loop(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    for step in training.steps():
        for x, y in step:
            training.loss(x, y).backward()


def another_pass(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    for step in training.steps():
        step.compute(training.loss)
        for x, y in step.again():
            training.loss(x, y).backward()


def no_call(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train(lambda x, y: x.sum().requires_grad_())


def two_calls(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train(lambda x, y: training.loss(x, y) + training.loss(x, y))


def no_loss(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train(lambda x, y: training.model(x))


def not_finite(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train(lambda x, y: training.loss(x, y) * float("inf"))


def no_tensor(run: unisono.Run) -> None:
    training = Training(run, middle=Odd())
    training.track()
    training.train()


def scaler(run: unisono.Run) -> None:
    training = Training(run)
    training.track(scaler=torch.amp.GradScaler("cpu"))
    training.train()


def lbfgs(run: unisono.Run) -> None:
    training = Training(run)
    training.optimizer = torch.optim.LBFGS(training.model.parameters())
    training.track()
    training.train()


def shard(run: unisono.Run) -> None:
    training = Training(run)
    training.optimizer = unisono.shard(training.optimizer)
    training.track()
    training.train()


def carried(run: unisono.Run) -> None:
    training = Training(run)
    training.track(rows=unisono.Carried(torch.zeros(24, 3)))
    training.train()


def delay(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train(delay=1)


def local_steps(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    for round_ in run.local_steps(DATA, batch_size=12, microbatches=4, epochs=2, replicas=2, inner_steps=2):
        for step in round_:
            for x, y in step:
                training.loss(x, y).backward()
            training.optimizer.step()


def batches(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    for _ in run.batches(DATA, batch_size=6):
        pass


def evaluation_beside(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    for step in training.steps():
        step.compute(training.loss)
        training.optimizer.step()
        run.evaluate(DATA, lambda batch: {"loss": training.loss(*batch)}, batch_size=6, wait=False)


def called_outside(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train()
    training.model(DATA.tensors[0])


def torch_clipping(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    for step in training.steps():
        step.compute(training.loss)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)


def wrong_evaluation(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train()
    run.evaluate(DATA, lambda batch: training.model(batch[0]), batch_size=6)


def whole(run: unisono.Run) -> None:
    training = Training(run)
    training.track()
    training.train()


TRAININGS: dict[str, Callable[[unisono.Run], None]] = {
    each.__name__: each
    for each in (
        *(no_stages, two_models, outside_of_stages, more_parts, plain_loop, another_pass, no_call, two_calls, no_loss),
        *(
            in_no_stages,
            in_shards,
            few_shards,
            not_finite,
            no_tensor,
            scaler,
            lbfgs,
            shard,
            carried,
            delay,
            local_steps,
            batches,
            evaluation_beside,
            torchscript,
        ),
        *(called_outside, torch_clipping, wrong_evaluation, whole),
    )
}


if __name__ == "__main__":
    with unisono.Run(seed=3) as run_:
        TRAININGS[sys.argv[1]](run_)
