"""Other ways to train, sums and sinks, with annotations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.testing import Faults, Outcome, run_workers
from unisono.views.watch import Sink


class Told:
    """A sink of one's own."""

    def emit(self, event: object) -> None:
        print(event)

    def close(self) -> None:
        pass


def local(data: TensorDataset) -> None:
    sink: Sink = Told()
    run = unisono.Run(sinks=[sink], audit=0.1)
    model = nn.Linear(8, 1)
    optimizer = unisono.shard(torch.optim.SGD(model.parameters(), lr=0.1), copies=2)
    carried = unisono.Carried(torch.zeros(10, 3))
    run.track(model=model, optimizer=optimizer, carried=carried)
    for turn in run.local_steps(data, batch_size=8, microbatches=2, replicas=2, inner_steps=4):
        for step in turn:
            for (inputs,) in step:
                loss: Tensor = model(inputs).mean()
                loss.backward()
            optimizer.step()
    gathered: list[int] = run.all_gather(run.rank)
    run.barrier()
    print(run.broadcast("a word"), gathered)


def tried(directory: str) -> Outcome:
    return run_workers("train.py", 3, directory=directory, faults=Faults().kill("w1", step=3, at="after_backward"))
