"""Kinds of variable stars, told from an endless stream of light curves of uneven lengths.

    python examples/light_curves.py                        # alone
    unisono run examples/light_curves.py --workers 4       # on four workers: the same bits

A telescope measures each star when the weather allows, and nobody knows the periods. Each of the M micro-batches of a
step reads a stream of its own, whichever worker computes it. A recurrent network reads the measurements in the order of
time; they are packed, so no curve is padded to the length of another.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import unisono

KINDS = ("RR Lyrae", "eclipsing", "in contact", "rotating")
TEST = 1_000_000  # number of the first star to test on


def brightness(kind: int, phases: Tensor, shape: float) -> Tensor:
    """Return the flux of a star at phases in [0, 1): about 1 from the least to the most; shape is in [0, 1]."""
    if kind == 0:  # pulsates: a steep rise, a slow decline
        rise = 0.1 + 0.15 * shape
        return torch.where(phases < rise, phases / rise, (1 - phases) / (1 - rise))
    if kind == 1:  # two stars that pass in front of each other, far apart
        first, second = ((((phases - middle + 0.5) % 1 - 0.5) / (0.03 + 0.03 * shape)) ** 2 for middle in (0.25, 0.75))
        return -(-first / 2).exp() - (0.3 + 0.6 * shape) * (-second / 2).exp()
    if kind == 2:  # so near that they touch: one minimum after the other
        return (2 * math.pi * phases).cos().abs() * (1 - 0.2 * shape * (phases - 0.5).sign())
    return (2 * math.pi * phases).sin() / 2  # with a spot


def star(number: int) -> tuple[Tensor, int]:
    """Return the curve of a star, (measurements, 2): days since the one before, and flux; and its kind."""
    draw = torch.Generator().manual_seed(number)
    kind = int(torch.randint(len(KINDS), (), generator=draw))
    period, start, shape, noise, clear = torch.rand(5, generator=draw).tolist()
    times = torch.arange(0, 2.5 + 2.5 * clear, 0.02)  # every half an hour, for some days
    clouds = F.interpolate(torch.rand(1, 1, 20, generator=draw), len(times), mode="linear")[0, 0]
    times = times[(torch.rand(len(times), generator=draw) < 0.8) & (clouds > 0.35)]
    flux = brightness(kind, (times / (0.4 + 0.8 * period) + start) % 1, shape)
    flux = flux + (0.02 + 0.1 * noise) * torch.randn(len(times), generator=draw)
    return torch.stack((10 * times.diff(prepend=times[:1]), (flux - flux.mean()) / flux.std()), 1), kind


def numbers(stream: int, num_streams: int, epoch: int) -> Iterator[int]:
    """Yield the stars of a stream, without an end."""
    yield from count(stream, num_streams)


def pack(stars: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
    curves, kinds = zip(*stars, strict=True)
    return pack_sequence(curves, enforce_sorted=False), torch.tensor(kinds)


class Reader(nn.Module):
    """Packed curves -> scores of the kinds, (n, kinds)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, width)
        self.kinds = nn.Linear(width, len(KINDS))

    def forward(self, curves: PackedSequence) -> Tensor:
        return self.kinds(self.recurrent(curves)[1][-1])


def without_times(test_set: list[tuple[Tensor, int]]) -> float:
    """Return the share that is told right by skewness and kurtosis of the flux: of the nearest of 500 other stars."""
    known = [star(number) for number in range(500)]
    found = [[[(c[:, 1] ** 3).mean(), (c[:, 1] ** 4).mean()] for c, _ in stars] for stars in (test_set, known)]
    nearest = torch.cdist(*map(torch.tensor, found)).argmin(1)
    return sum(known[place][1] == kind for place, (_, kind) in zip(nearest, test_set, strict=True)) / len(test_set)


def draw(test_set: list[tuple[Tensor, int]], titles: list[str], path: Path) -> None:
    """Draw a star of each kind."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no figure: it needs matplotlib")
    figure = Figure((6, 7), layout="constrained")
    for kind, (axes, title) in enumerate(zip(figure.subplots(len(KINDS)), titles, strict=True)):
        curve = next(curve for curve, true in test_set if true == kind)
        axes.plot(curve[:, 0].cumsum(0) / 10, curve[:, 1], ".", markersize=3)
        axes.set(title=title, xlabel="days", ylabel="flux")
    return print(f"figure: {figure.savefig(path) or path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: too few stars to learn from")
    parser.add_argument("--epochs", type=int, default=8, help="of 3,200 stars")
    parser.add_argument("--batch-size", type=int, default=64, help="stars")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--run-dir", default="runs/light_curves")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    steps, epochs = (10, 2) if arguments.quick else (3200 // arguments.batch_size, arguments.epochs)

    run = unisono.Run(arguments.run_dir, seed=arguments.seed, overwrite=arguments.overwrite)
    stars = unisono.Streams(numbers, transform=star)
    options = {"batch_size": arguments.batch_size, "microbatches": arguments.microbatches, "collate": pack}
    test_set = [star(TEST + number) for number in range(50 if arguments.quick else 500)]
    model = Reader().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    run.track(model=model, optimizer=optimizer)

    for _ in run.epochs(epochs):
        for step in run.steps(stars, max_steps=steps, **options):
            for curves, kinds in step:
                loss = F.cross_entropy(model(curves), kinds)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def tally(batch: tuple[PackedSequence, Tensor]) -> dict[str, Tensor]:
        curves, kinds = batch
        right = kinds[model(curves).argmax(1) == kinds]
        return {"right": right.bincount(minlength=len(KINDS)), "seen": kinds.bincount(minlength=len(KINDS))}

    totals = run.evaluate(DataLoader(test_set, batch_size=50, collate_fn=pack), tally)
    if run.is_main:
        share = totals["right"].sum() / totals["seen"].sum()
        print(
            f"test accuracy {share:.2%} ({len(test_set)} stars; {without_times(test_set):.2%} by moments of the flux)"
        )
        shares = totals["right"] / totals["seen"]
        titles = [f"{kind}: {share:.0%} right" for kind, share in zip(KINDS, shares, strict=True)]
        draw(test_set, titles, Path(run.directory or ".", "light_curves.png"))


if __name__ == "__main__":
    main()
