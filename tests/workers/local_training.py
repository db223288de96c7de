"""A training in rounds of local steps, for tests of what happens around it: ``unisono run local_training.py``.

With ``--gates DIR``, every worker stops at the head of round N while a test holds gate N (`gates`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.disk import wait_for_disk
from tests.workers.gates import wait_at

NUM_SAMPLES = 48
BATCH_SIZE = 24
MICROBATCHES = 6
INNER_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--inner-state", default="kept")
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--delta", default="fp32")
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--even", action="store_true", help="all workers compute as much")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    policy = unisono.Checkpoints(every_steps=arguments.every, keep=100) if arguments.every else None
    with unisono.Run(seed=3, checkpoint=policy, balance=not arguments.even) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(NUM_SAMPLES, 12, generator=draw), torch.randint(0, 4, (NUM_SAMPLES,), generator=draw)
        )
        model = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4)).to(
            run.device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, outer=outer)

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            inputs, labels = batch
            return {"right": (model(inputs).argmax(1) == labels).sum()}

        rounds = run.local_steps(
            data,
            batch_size=BATCH_SIZE,
            microbatches=MICROBATCHES,
            replicas=arguments.replicas,
            inner_steps=INNER_STEPS,
            outer=None if arguments.average else outer,
            inner_state=arguments.inner_state,
            copies=arguments.copies,
            delta=arguments.delta,
            epochs=1000,
            max_steps=arguments.rounds * INNER_STEPS - 1,
        )
        for round_ in rounds:
            wait_at(arguments.gates / str(round_.number))
            if arguments.every:
                wait_for_disk(run)
            for step in round_:
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
                    step.add(seen=len(labels), **{"inputs": inputs.sum()} if round_.number >= 2 else {})
                optimizer.step()
                scheduler.step()
            round_.log(lr=optimizer.param_groups[0]["lr"])
            if round_.number % 3 == 1:
                run.evaluate(data, count, batch_size=7)


if __name__ == "__main__":
    main()
