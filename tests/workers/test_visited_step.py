"""What an evaluator reads of a step is what the members read: by that a script decides what it evaluates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.workers.static_team import AloneRun
from unisono.messages import EvaluationWanted
from unisono.process import Process
from unisono.training.evaluator import VisitedStep

READ = ("number", "place", "epoch", "index", "is_last_of_epoch", "num_samples", "is_complete")


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
            assert run._loop is not None
            order = EvaluationWanted(
                number=0, phases=1, step=step.place, samples=56, batch_size=8, number_in_loop=step.number
            )
            visited = VisitedStep(run._loop.cursor, order, run._loop.num_steps, Process())
            assert {name: getattr(visited, name) for name in READ} == {name: getattr(step, name) for name in READ}
            if step.num_samples:
                assert visited.sample_indices(1) == step.sample_indices(1)
            assert [*visited] == [*visited.again()] == []
            lasts += visited.is_last_of_epoch
    assert lasts == 2
