"""Weather on a sphere: a U-Net learns how the winds of a planet develop in a day.

    python examples/weather.py                        # alone
    unisono run examples/weather.py --workers 4       # on four workers: the same bits

The script computes the weather by the barotropic vorticity equation, with spherical harmonics (T21). The grid is one of
latitudes and longitudes: so a convolution goes around the globe, and over a pole to the other side of it, and in the
loss each point has the weight of its area. Lengths are in radii of the planet, times in its days.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

LATITUDES, LONGITUDES, WAVES, STEPS = 32, 64, 22, 12  # the grid has the products of so many waves; steps of a day


def legendre(sines: Tensor) -> Tensor:
    """Return the part of each spherical harmonic that depends on the latitude: (orders, degrees, latitudes)."""
    zero, found = torch.zeros_like(sines), {(0, 0): torch.full_like(sines, math.sqrt(0.5))}
    for n in range(1, WAVES):
        for m in range(n):
            before = math.sqrt(((n - 1) ** 2 - m**2) / (4 * (n - 1) ** 2 - 1)) * found.get((m, n - 2), zero)
            found[m, n] = math.sqrt((4 * n**2 - 1) / (n**2 - m**2)) * (sines * found[m, n - 1] - before)
        found[n, n] = math.sqrt(1 + 0.5 / n) * (1 - sines**2).sqrt() * found[n - 1, n - 1]
    return torch.stack([torch.stack([found.get((m, n), zero) for n in range(WAVES)]) for m in range(WAVES)])


def simulate(num_planets: int, days: int) -> TensorDataset:
    """Return days, (n, 3, latitudes, longitudes), the change of vorticity in each, and areas, both (n, 1, ...)."""
    steps, degrees = torch.arange(1, LATITUDES).double(), torch.arange(WAVES).double()
    side = (steps / (4 * steps**2 - 1).sqrt()).diag(1)
    sines, vectors = torch.linalg.eigh(side + side.T)  # latitudes by the rule of Gauss, whose weights are the areas
    shapes, slopes = (each + 0j for each in torch.func.jvp(legendre, (sines,), (torch.ones_like(sines),)))
    areas, latitudes = 2 * vectors[0] ** 2, sines.expand(LONGITUDES, num_planets, -1)
    east = 1j * torch.arange(WAVES).view(-1, 1, 1)  # the slope to the east
    inverse = -1 / (degrees * (degrees + 1)).clamp(min=1)  # of the Laplacian: from vorticity to stream function

    def to_grid(waves: Tensor, shapes: Tensor) -> Tensor:  # from (orders, planets, degrees)
        return torch.fft.irfft(waves @ shapes, LONGITUDES, 0, norm="forward")

    def to_waves(grid: Tensor) -> Tensor:  # from (longitudes, planets, latitudes)
        return torch.fft.rfft(grid, dim=0, norm="forward")[:WAVES] @ (shapes * areas).mT

    def change(waves: Tensor) -> Tensor:  # in time: the wind carries the vorticity and that of the planet along
        north = to_grid(east * inverse * waves, shapes) * (to_grid(waves, slopes) + 4 * math.pi)
        return to_waves(to_grid(inverse * waves, slopes) * to_grid(east * waves, shapes) - north)

    waves = to_waves(torch.randn(LONGITUDES, num_planets, LATITUDES).double())
    waves, seen = 1.8 * degrees * (-(((degrees - 7) / 3) ** 2)).exp() * waves, []  # with winds as on Earth
    for time in range(STEPS * (days + 5) + 1):
        if time % STEPS == 0 and time >= STEPS * 5:
            fields = to_grid(waves, shapes), to_grid(20 * inverse * waves, shapes), latitudes  # the network's input
            seen.append(torch.stack(fields).permute(2, 0, 3, 1).float())
        now = waves
        for part in (4, 3, 2, 1):  # Runge and Kutta
            waves = now + change(waves) / (part * STEPS)
        waves = waves * (-4 / STEPS * (degrees / WAVES) ** 8).exp()  # the smallest ones are damped
    days_before, days_after = torch.cat(seen[:-1]), torch.cat(seen[1:])
    return TensorDataset(days_before, (days_after - days_before)[:, :1], (1 - days_before[:, 2:] ** 2).sqrt())


class Convolution(nn.Conv2d):
    """On the globe: (n, channels, latitudes, longitudes) -> the same size."""

    def forward(self, x: Tensor) -> Tensor:
        behind = x.roll(x.shape[-1] // 2, -1)
        x = F.pad(torch.cat((behind[..., :1, :], x, behind[..., -1:, :]), -2), (1, 1, 0, 0), mode="circular")
        return super().forward(x)


class Beside(nn.Sequential):  # gives its input, and its output as more channels
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, super().forward(x)), 1)


def unet(width: int = 16) -> nn.Module:
    """A network from a day (n, 3, latitudes, longitudes) to the change of its vorticity (n, 1, ...)."""

    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(Convolution(before, after, 3), nn.GELU(), Convolution(after, after, 3), nn.GELU())

    half, double = nn.AvgPool2d(2), nn.Upsample(scale_factor=2)
    inner = Beside(half, block(2 * width, 4 * width), double)
    outer = Beside(half, block(width, 2 * width), inner, block(6 * width, 2 * width), double)
    return nn.Sequential(block(3, width), outer, block(3 * width, width), nn.Conv2d(width, 1, 1))


def draw(fields: list[Tensor], path: str) -> None:
    """Draw fields (1, 1, latitudes, longitudes) one above the other."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no figure: it needs matplotlib")
    figure = Figure((5, 7), layout="constrained")
    for axes, field in zip(figure.subplots(len(fields)), fields, strict=True):
        axes.imshow(field[0, 0], "RdBu_r", vmin=-4, vmax=4, origin="lower", extent=(0, 360, -90, 90))
    return print(f"figure (a day, its change, and the predicted one): {figure.savefig(path) or path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds: few days, three epochs")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="days")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--run-dir", default="runs/weather")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    days, epochs = (4, 3) if arguments.quick else (20, arguments.epochs)

    run = unisono.Run(arguments.run_dir, seed=arguments.seed, overwrite=arguments.overwrite)
    train_set, test_set = simulate(32, days), simulate(8, days)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    model = unet().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    run.track(model=model, optimizer=optimizer)

    for _ in run.epochs(epochs):
        for step in run.steps(train_loader, microbatches=arguments.microbatches):
            for today, change, areas in step:
                loss = (areas * (model(today) - change) ** 2).mean()
                loss.backward()
            optimizer.step()

    def measure(batch: list[Tensor]) -> dict[str, Tensor]:
        today, change, areas = batch
        return {"error": (areas * (model(today) - change) ** 2).sum(), "change": (areas * change**2).sum()}

    totals = run.evaluate(DataLoader(test_set, batch_size=16), measure)
    if run.is_main:
        share = (totals["error"] / totals["change"]) ** 0.5
        print(f"test error {share:.2%} of that of a forecast without change ({len(test_set)} days)")
        today, change, _ = test_set[-1:]
        draw([today, change, model(today.to(run.device)).detach().cpu()], f"{run.directory}/weather.png")


if __name__ == "__main__":
    main()
