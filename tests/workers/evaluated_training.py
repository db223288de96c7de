"""A training of a moment that evaluates beside itself: ``unisono run evaluated_training.py -- --steps 8``.

With ``--gates DIR``, workers stop at the head of step N while a test holds gate N, and evaluators before their batch
B while it holds gate `EVALUATORS` + B.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.waiting import wait_until
from tests.workers.gates import wait_at
from unisono.strategies.local.localround import LocalRound

EVALUATORS = 1000


def see_end_of_all(run: unisono.Run) -> None:
    """Wait until this worker sees that the evaluations under way have come to their end."""
    begun, outcome = run._evaluations._begun, run._evaluations._beside.outcome
    wait_until(lambda: all(outcome(number) is not None for number in begun.unsettled), "evaluations end")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--loops", type=int, default=1)
    parser.add_argument("--later", type=int, default=2, help="ask for results so many steps later; 0: never")
    parser.add_argument("--every", type=int, default=4, help="evaluate so often within the first loop")
    parser.add_argument("--seen-at", type=int, help="wait there until the evaluations under way have come to their end")
    parser.add_argument("--broken", action="store_true", help="an evaluator raises")
    parser.add_argument("--directory", type=Path, help="of a run that is not started by unisono run")
    parser.add_argument("--twice", action="store_true", help="two evaluations at each place")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    checkpoint = unisono.Checkpoints(every_steps=2) if arguments.save else None
    with unisono.Run(
        arguments.directory, seed=3, checkpoint=checkpoint, resume="auto" if arguments.save else None
    ) as run:
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(54, 12, generator=draw), torch.randint(0, 4, (54,), generator=draw))
        model = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4)).to(
            run.device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        if arguments.shard:
            optimizer = unisono.shard(optimizer, copies=2)
        model.temperature = 1.0  # type: ignore[assignment]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        assert run.broadcast("said") == "said"
        batches = 0

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            nonlocal batches
            if run.rank < 0:
                assert not arguments.broken
                wait_at(arguments.gates / str(EVALUATORS + batches))
                batches += 1
            inputs, labels = batch
            scores = model(inputs)
            loss = F.cross_entropy(scores, labels, reduction="sum")
            rate = torch.tensor(optimizer.param_groups[0]["lr"] + scheduler.last_epoch)
            return {"right": (scores.argmax(1) == labels).sum(), "loss": loss / model.temperature, "rate": rate}

        def evaluate() -> None:
            run.evaluate(data, count, batch_size=7, wait=False)
            if arguments.twice:
                run.evaluate(data, count, batch_size=9, wait=False)

        def look(step: unisono.Step | LocalRound, loop: int) -> None:
            model.temperature *= 1.1  # type: ignore[assignment, operator]
            for evaluation in run.pending_evaluations:
                if arguments.later and evaluation.step + arguments.later <= step.number:
                    evaluation.result()
            if loop == 0 and step.number_in_loop % arguments.every == 1:
                evaluate()

        def train(step: unisono.Step) -> None:
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
                if not arguments.delay:
                    step.add(seen=len(labels))
            optimizer.step()
            scheduler.step()

        given: dict[str, Any] = {"batch_size": 24, "microbatches": 8, "epochs": 1000, "max_steps": arguments.steps}
        for loop in range(arguments.loops):
            if arguments.local:
                for round_ in run.local_steps(data, replicas=2, inner_steps=2, drop_last=True, **given):
                    for step in round_:
                        train(step)
                    look(round_, loop)
            else:
                for step in run.steps(data, delay=arguments.delay, **given):
                    if run.rank >= 0:
                        wait_at(arguments.gates / str(step.number))
                    if step.number == arguments.seen_at:
                        see_end_of_all(run)
                    train(step)
                    assert arguments.delay or step.totals["seen"] == step.num_samples
                    look(step, loop)
            evaluate()


if __name__ == "__main__":
    main()
