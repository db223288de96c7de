"""What local steps cost in quality: the loss after as many samples, for replicas K, inner steps H and outer optimizers.

python -m benchmarks.quality                                   # about an hour on one core
python -m benchmarks.quality --replicas 1,4 --inner-steps 10 --steps 200 --json quality.json

By one worker alone, because the bits do not depend on the workers. A small transformer learns the text of this
project's documentation, byte by byte. Every training sees the same batches of 64 windows in the same order, with AdamW
and the same schedule of learning rates; with K replicas each of them trains on its part of each batch. The first row is
the plain ``run.steps``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from examples.language_model import MASKED, Transformer, loss_of
from torch import Tensor, nn

import unisono
from benchmarks.report import print_table, write_json
from benchmarks.rounding import BATCH, DEPTH, LENGTH, WIDTH, texts

Outer = Literal["average", "nesterov"]
MICROBATCHES = 8
RATE = 3e-3


def train(seed: int, num_steps: int, replicas: int, inner_steps: int, outer: Outer, inner_state: str) -> float:
    """Train, and return the mean loss of the test set in nats per byte.

    Args:
        replicas: 0 trains with the plain ``run.steps``.
    """
    train_set, test_set = texts()
    with unisono.Run(seed=seed, device="cpu") as run:
        model = Transformer(LENGTH, WIDTH, DEPTH, heads=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=num_steps, pct_start=0.1)
        momentum = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, outer=momentum)
        data: dict[str, Any] = {
            "batch_size": BATCH, "microbatches": MICROBATCHES, "epochs": 1000, "max_steps": num_steps, "drop_last": True
        }  # fmt: skip

        def update(step: unisono.Step) -> None:
            for text, following in step:
                step.backward(loss_of(model, text, following), weight=int((following != MASKED).sum()))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        if replicas == 0:
            for step in run.steps(train_set, **data):
                update(step)
        else:
            for round_ in run.local_steps(
                train_set,
                **data,
                replicas=replicas,
                inner_steps=inner_steps,
                outer=momentum if outer == "nesterov" else None,
                inner_state="kept" if inner_state == "kept" else "fresh",
            ):
                for step in round_:
                    update(step)

        def measure(batch: Sequence[Tensor]) -> dict[str, Any]:
            text, following = batch
            return {"nats": loss_of(model, text, following, "sum"), "tokens": (following != MASKED).sum()}

        totals = run.evaluate(test_set, measure, batch_size=64)
        return float(totals["nats"] / totals["tokens"])


def settings(arguments: argparse.Namespace) -> Iterator[tuple[int, int, Outer, str]]:
    """Yield (replicas, inner steps, outer, inner state), the plain training first."""
    yield 0, 1, "average", "-"
    for replicas in arguments.replicas:
        for inner_steps in arguments.inner_steps:
            for outer in arguments.outer:
                for state in arguments.inner_state:
                    yield replicas, inner_steps, outer, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--inner-steps", type=_numbers, default=[1, 10, 50])
    parser.add_argument("--outer", type=lambda text: text.split(","), default=["average", "nesterov"])
    parser.add_argument("--inner-state", type=lambda text: text.split(","), default=["kept"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for replicas, inner_steps, outer, state in settings(arguments):
        began = time.perf_counter()
        losses = [train(seed, arguments.steps, replicas, inner_steps, outer, state) for seed in range(arguments.seeds)]
        row = {
            "replicas": replicas or "plain",
            "inner_steps": inner_steps,
            "outer": outer if replicas else "-",
            "inner_state": state,
            "loss": round(statistics.mean(losses), 4),
            "seconds": round(time.perf_counter() - began, 1),
        }
        rows.append(row)
        print(*(f"{name} {value}" for name, value in row.items()), flush=True)
    print_table([*rows[0]], [[str(value) for value in row.values()] for row in rows])
    if arguments.json is not None:
        figures = {".".join(map(str, [*row.values()][:5])): row["loss"] for row in rows}
        write_json(arguments.json, figures, rows)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
