"""What ``wire="bf16"`` costs: in the loss that a training ends with, and in the time to compute a step.

python -m benchmarks.rounding                        # some minutes
python -m benchmarks.rounding --seeds 3 --steps 400 --json rounding.json

Both by one worker alone, because the bits do not depend on the workers. **Quality**: a small transformer learns the
text of this project's documentation, byte by byte, with several seeds; what differs between the seeds says what a
difference between the wires means. **Time**: the largest case (25 million parameters, little to compute), in turns.
What the wire gains, between hosts, is measured by ``python -m benchmarks.network --sides unisono,unisono-bf16``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from examples.language_model import MASKED, Transformer, Windows, loss_of
from torch import nn

import unisono
from benchmarks.models import CASES
from benchmarks.report import median_interval, print_table, write_json

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
LENGTH, WIDTH, DEPTH, BATCH = 64, 64, 2, 64
MICROBATCHES = [8, 64]
WARM_UP = 1

Wire = Literal["fp32", "bf16"]
WIRES: tuple[Wire, Wire] = ("fp32", "bf16")


@functools.cache
def texts() -> tuple[Windows, Windows]:
    """Windows to train on, and those of every tenth page to test on."""
    pages = [path.read_bytes() for path in sorted(DOCUMENTS.glob("*.md"))]
    return Windows([page for number, page in enumerate(pages) if number % 10], LENGTH), Windows(pages[::10], LENGTH)


def test_loss(wire: Wire, microbatches: int, seed: int, num_steps: int) -> float:
    """Train, and return the mean loss of the test set in nats per byte."""
    train_set, test_set = texts()
    with unisono.Run(seed=seed, device="cpu") as run:
        model = Transformer(LENGTH, WIDTH, DEPTH, heads=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps, pct_start=0.1)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        steps = run.steps(
            train_set, batch_size=BATCH, microbatches=microbatches, epochs=1000, max_steps=num_steps, wire=wire
        )
        for step in steps:
            for text, following in step:
                step.backward(loss_of(model, text, following), weight=int((following != MASKED).sum()))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        def measure(batch: Any) -> dict[str, Any]:
            text, following = batch
            return {"nats": loss_of(model, text, following, "sum"), "tokens": (following != MASKED).sum()}

        totals = run.evaluate(test_set, measure, batch_size=64)
    return float(totals["nats"] / totals["tokens"])


def step_s(wire: Wire, microbatches: int, num_steps: int) -> float:
    """The median time of a step of the largest case."""
    case = CASES["mlp"]
    gc.collect()  # the run before holds its slots
    with unisono.Run(seed=1, device="cpu") as run:
        model = case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run.track(model=model, optimizer=optimizer)
        data = case.data(case.microbatch_size * microbatches)
        times = []
        for step in run.steps(
            data,
            batch_size=len(data),
            microbatches=microbatches,
            epochs=num_steps + WARM_UP,
            wire=wire,
        ):
            since = time.perf_counter()
            for inputs, labels in step:
                step.backward(case.loss(model, inputs, labels), weight=len(labels))
            optimizer.step()
            times.append(time.perf_counter() - since)
    return statistics.median(times[WARM_UP:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of a training")
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and the single runs")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.turns < 1:
        parser.error("at least one seed and one turn")
    torch.set_num_threads(1)
    figures, runs, rows = dict[str, float](), list[dict[str, Any]](), []
    for microbatches in options.microbatches:
        losses = [
            {wire: test_loss(wire, microbatches, seed, options.steps) for wire in WIRES}
            for seed in range(1, options.seeds + 1)
        ]
        print(f"M={microbatches}: {losses}", file=sys.stderr, flush=True)
        turns = [
            {wire: step_s(wire, microbatches, max(1, 16 // microbatches)) for wire in WIRES[:: 1 - 2 * (number % 2)]}
            for number in range(options.turns)
        ]
        print(f"M={microbatches}: {turns}", file=sys.stderr, flush=True)
        ratio = median_interval([turn["bf16"] / turn["fp32"] for turn in turns])
        more = [each["bf16"] - each["fp32"] for each in losses]
        spread = statistics.stdev([each["fp32"] for each in losses]) if len(losses) > 1 else 0.0
        figures[f"step_ratio.{microbatches}"] = ratio.median
        figures[f"loss_more.{microbatches}"] = statistics.mean(more)
        figures[f"loss_spread.{microbatches}"] = spread
        runs.append({"microbatches": microbatches, "step_s": turns, "losses": losses})
        by_wire = [" ".join(f"{each[wire]:.4f}" for each in losses) for wire in WIRES]
        rows.append([str(microbatches), *by_wire, f"{statistics.mean(more):+.4f}", f"{spread:.4f}", str(ratio)])
    print_table(("M", "test loss, fp32", "bf16", "more", "between seeds", "step alone, bf16 to fp32"), rows)
    if options.json:
        write_json(options.json, figures, runs)


if __name__ == "__main__":
    main()
