"""What an evaluator reads of a step is what the members read: by that a script decides what it evaluates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.workers.static_team import AloneRun
from unisono.engine.checkpoint.evaluations import EvaluationOrder
from unisono.script.evaluator import VisitedRound, visited
from unisono.system.process import Process

READ = ("number", "number_in_loop", "epoch", "index", "is_last_of_epoch", "num_samples", "is_complete", "has_gradient")


@pytest.mark.parametrize("delay", [0, 2])
def test_an_evaluator_reads_what_the_members_read(delay: int) -> None:
    data = TensorDataset(torch.randn(56, 3), torch.randint(0, 2, (56,)))
    lasts = 0
    with AloneRun(seed=3) as run:
        model = nn.Linear(3, 2)
        run.track(model=model)
        for step in run.steps(data, batch_size=24, microbatches=4, epochs=2, drop_last=False, delay=delay):
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            assert run._training.loop is not None
            order = EvaluationOrder(
                number=0,
                phases=1,
                step=step.number,
                samples=56,
                batch_size=8,
                number_in_loop=step.number_in_loop,
                loss=step.loss,
            )
            seen = visited(run._training.loop, order, Process())
            assert {name: getattr(seen, name) for name in READ} == {name: getattr(step, name) for name in READ}
            if step.num_samples:
                assert seen.sample_indices(1) == step.sample_indices(1)
            assert [*seen] == [*seen.again()] == []
            lasts += seen.is_last_of_epoch
    assert lasts == 2


def test_an_evaluator_reads_of_a_round_what_the_members_read() -> None:
    data = TensorDataset(torch.randn(56, 3), torch.randint(0, 2, (56,)))
    with AloneRun(seed=3) as run:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        given = {"batch_size": 16, "microbatches": 4, "epochs": 3, "drop_last": True}
        for round_ in run.local_steps(data, replicas=2, inner_steps=2, **given):
            for step in round_:
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            assert run._training.loop is not None
            order = EvaluationOrder(
                number=0, phases=1, step=round_.number, samples=56, batch_size=8, number_in_loop=round_.number_in_loop
            )
            seen = visited(run._training.loop, order, Process())
            for name in ("number", "number_in_loop", "epoch", "num_samples", "steps", "is_complete"):
                assert getattr(seen, name) == getattr(round_, name), name
            assert isinstance(seen, VisitedRound)
            assert len(seen) == len(round_)
            assert [*seen] == []
