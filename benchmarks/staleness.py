"""What a delay costs and what it gains: quality by delay and optimizer, and the time of a step with workers that stall.

python -m benchmarks.staleness quality --json quality.json     # half an hour
python -m benchmarks.staleness stalls --json stalls.json       # minutes
python -m benchmarks.network --links 100m --hosts 2 --sizes 4 --sides unisono,delay1,ddp,plain      # a slow link

**Quality**: a small transformer learns the bytes of this project's documentation, with equal samples for every delay.
The figure is the mean loss of the last tenth of the steps, at the best of some learning rates, over some seeds; with
each delay also with predicted parameters (``predict=True``).

**Stalls**: each worker stops for a while now and then, each at times of its own, as on a machine that others use too.
The sides (DDP over gloo, no delay, some delays) take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from benchmarks.report import ROOT, median_interval, print_table, write_json
from benchmarks.step_time import started

LENGTH = 64
BATCH = 16
WIDTH = 64
DELAYS = (0, 1, 2, 4)
Make = Callable[[nn.Module, float], list[torch.optim.Optimizer]]


def _one(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [kind(model.parameters(), lr=lr)]


ADAMW = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1)


def _muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW at 3e-3 for all else."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and name.startswith("layers.")]
    known = {id(one) for one in matrices}
    others = [one for one in model.parameters() if id(one) not in known]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1), ADAMW(others, lr=3e-3)]


OPTIMIZERS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "adamw": (partial(_one, ADAMW), (1e-3, 3e-3)),
    "sgd": (partial(_one, partial(torch.optim.SGD, momentum=0.9)), (0.1, 0.3)),
    "muon": (_muon, (1e-2, 3e-2)),
}


# -- quality -----------------------------------------------------------------------------------------


class Model(nn.Module):
    """A transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.layers(self.bytes(text) + self.places, self.mask, is_causal=True)
        result: Tensor = self.last(hidden)
        return result


def documentation() -> TensorDataset:
    """(LENGTH,) bytes and those that follow, of all pages."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(Path(page).read_bytes() for page in pages)), dtype=torch.uint8).long()
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def loss_after(optimizer: str, lr: float, delay: int, predict: bool, seed: int, num_steps: int) -> float:
    """The mean loss of the last tenth of the steps: with predicted parameters, a loss of these."""
    losses = []
    with unisono.Run(seed=seed, device="cpu") as run:
        model = Model()
        chosen = OPTIMIZERS[optimizer][0](model, lr)
        warm = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 50)) for one in chosen]
        run.track(model=model)
        moved: list[Any] = [*chosen, *warm]
        for number, (one, schedule) in enumerate(zip(chosen, warm, strict=True)):
            run.track(**{f"optimizer{number}": one, f"warm{number}": schedule})
        options: dict[str, Any] = {"batch_size": BATCH, "microbatches": 1, "epochs": 1000, "max_steps": num_steps}
        for step in run.steps(documentation(), **options, delay=delay, predict=predict):
            for text, following in step:
                F.cross_entropy(model(text).flatten(0, 1), following.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in moved:
                each.step()
            if step.has_gradient:
                losses.append(step.loss)
    return statistics.mean(losses[-max(1, num_steps // 10) :])


def variants(delays: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Each delay, and whether parameters are predicted."""
    for delay in delays:
        yield delay, False
        if delay:
            yield delay, True


def quality(options: argparse.Namespace) -> None:
    figures, runs, rows = {}, [], []
    for optimizer in options.optimizers:
        best: dict[str, float] = {}
        for delay, predict in variants(options.delays):
            name, found = f"{delay} predicted" if predict else str(delay), {}
            for lr in OPTIMIZERS[optimizer][1]:
                losses = [
                    loss_after(optimizer, lr, delay, predict, seed, options.steps)
                    for seed in range(options.first_seed, options.first_seed + options.seeds)
                ]
                found[lr] = statistics.mean(losses)
                runs.append({"optimizer": optimizer, "lr": lr, "delay": delay, "predict": predict, "losses": losses})
                print(f"{optimizer} lr {lr:g} delay {name}: {found[lr]:.4f} {losses}", file=sys.stderr, flush=True)
            best[name] = min(found.values())
            figures[f"loss.{optimizer}.delay{name.replace(' ', '.')}"] = best[name]
            more = best[name] - best[str(options.delays[0])]
            rows.append(
                [optimizer, name, f"{min(found, key=found.__getitem__):g}", f"{best[name]:.4f}", f"{more:+.4f}"]
            )
    print_table(("optimizer", "delay", "best lr", "loss", "against no delay"), rows)
    if options.json:
        write_json(options.json, figures, runs)


# -- stalls ------------------------------------------------------------------------------------------


def _commands(side: str, case: str, workers: int, stalls: Sequence[float], folder: Path) -> list[list[str]]:
    shared = [case, "--microbatches", str(2 * workers), "--control", str(folder / f"{side}.socket")]
    shared += ["--stalls", *map(str, stalls)]
    if side == "ddp":
        meeting = ["--workers", str(workers), "--meeting", str(folder / "meeting")]
        this = [sys.executable, "-m", "benchmarks.sides", "ddp", *shared, *meeting]
        return [[*this, "--rank", str(rank)] for rank in range(workers)]
    head = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.sides", "--workers", str(workers)]
    delay = side.removeprefix("delay")
    return [[*head, "--run-dir", str(folder / side), "--", "unisono", *shared, "--delay", delay]]


def stalls(options: argparse.Namespace) -> None:
    sides = ["ddp", *(f"delay{delay}" for delay in options.delays)]
    stalled = (options.chance, options.seconds)
    commands = {side: partial(_commands, side, options.case, options.workers, stalled) for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    with started(commands, options.workers) as teams:
        for team in teams:
            team.steps(6)
        for turn in range(options.turns):
            for team in teams if turn % 2 == 0 else reversed(teams):
                times[team.name].append(statistics.mean(team.steps(options.steps + 1)[1:]))
        for team in teams:
            team.finish()
    figures: dict[str, Any] = {}
    rows = []
    for side in sides:
        ratio = median_interval([a / b for a, b in zip(times[side], times["ddp"], strict=True)])
        figures[f"step_ms.{side}"] = 1000 * statistics.median(times[side])
        figures[f"ratio_to_ddp.{side}"] = ratio.median
        rows.append([side, f"{figures[f'step_ms.{side}']:.1f}", str(ratio)])
    print_table(("side", "mean step ms", "ratio to DDP (95%)"), rows)
    if options.json:
        write_json(options.json, figures, [{"case": options.case, "stalls": stalled, "step_s": times}])


def _delays(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "stalls"])
    parser.add_argument("--delays", type=_delays, default=list(DELAYS), metavar="N,N")
    parser.add_argument("--optimizers", type=lambda text: text.split(","), default=[*OPTIMIZERS], metavar="A,B")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of a training (600), or of a turn (20)")
    parser.add_argument("--case", default="mlp_small")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--chance", type=float, default=0.1, help="of a stall, in each step of each worker")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a stall")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all runs")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (600 if options.what == "quality" else 20)
    (quality if options.what == "quality" else stalls)(options)


if __name__ == "__main__":
    main()
