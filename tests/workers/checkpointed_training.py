"""A training of a moment that writes checkpoints: ``unisono run checkpointed_training.py -- --steps 12 --every 3``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.cluster.worker import member
from unisono.record.rundir import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.disk import wait_for_disk
from tests.workers.gates import wait_at

NUM_SAMPLES = 54
BATCH_SIZE = 24


class Best:
    """A user's own state: the best so far, and the samples that were seen."""

    def __init__(self) -> None:
        self.right, self.seen = -1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"right": self.right, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.right, self.seen = state["right"], state["seen"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--resume")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=33)
    parser.add_argument("--phases", type=int, default=1)
    parser.add_argument("--copies", type=int, default=0, help="of a sharded optimizer; 0: it is replicated")
    parser.add_argument("--blind", nargs="*", default=[], help="workers that do not see the run's directory")
    parser.add_argument("--anyway", nargs="*", default=[])
    parser.add_argument("--must-succeed", action="store_true")
    parser.add_argument("--even", action="store_true", help="all workers compute as many micro-batches")
    parser.add_argument("--wait-for-disk", action="store_true", help="every checkpoint that is due is made")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    own = member.current()
    if own is not None and own.worker_id in arguments.blind:
        RunDirectory.enter = lambda *_: None  # type: ignore[method-assign]
    policy = unisono.Checkpoints(
        every_steps=arguments.every or None,
        keep=arguments.keep,
        exit_code_on_sigterm=75,
        must_succeed=arguments.must_succeed,
    )
    with unisono.Run(
        arguments.directory,
        seed=3,
        checkpoint=policy,
        balance=not arguments.even,
        resume=arguments.resume,
        resume_anyway=arguments.anyway,
    ) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(NUM_SAMPLES, 12, generator=draw), torch.randint(0, 4, (NUM_SAMPLES,), generator=draw)
        )
        width = arguments.width
        model = nn.Sequential(
            nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if arguments.copies:
            optimizer = unisono.shard(optimizer, copies=arguments.copies)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        best = Best()
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, best=best, average=average)

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            inputs, labels = batch
            return {"right": (model(inputs).argmax(1) == labels).sum()}

        for phase in range(arguments.phases):
            for step in run.steps(
                data,
                batch_size=BATCH_SIZE,
                microbatches=arguments.microbatches,
                epochs=10**9,
                max_steps=arguments.steps + phase,
            ):
                wait_at(arguments.gates / str(step.number_in_loop))
                if arguments.wait_for_disk:
                    wait_for_disk(run)
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
                optimizer.step()
                scheduler.step()
                average.update_parameters(model)
                best.seen += step.num_samples
                if step.number_in_loop % 4 == 2:
                    right = run.evaluate(data, count, batch_size=7)["right"]
                    best.right = max(best.right, int(right))
                    step.log(right=right)
                print(f"did step {step.number_in_loop}", flush=True)
            run.evaluate(data, count, batch_size=7)
        print(f"best {best.right}, seen {best.seen}", flush=True)


if __name__ == "__main__":
    main()
