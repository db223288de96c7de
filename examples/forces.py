"""A potential for clusters of silicon: a network learns their energies, and by its gradient the forces on the atoms.

    python examples/forces.py                        # alone
    unisono run examples/forces.py --workers 4       # on four workers: the same bits

What is learned is computed here, by the potential of Stillinger and Weber (1985), which bends an atom's bonds towards
the angles of a tetrahedron. The network sees distances and angles only, so a rotation does not change its energy, and
its forces are the gradient of that. A loss on forces needs second derivatives; with --force-weight 0 it has none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

ATOMS, HEAT = 8, 0.26  # of a cluster; its k T, in eV: 3,000 kelvin, so that bonds bend and break
EPSILON, SIGMA = 2.1683, 2.0951  # of silicon, in eV and in angstrom
REACH = 1.8 * SIGMA  # atoms that are farther apart do not feel each other


def bonds(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances (n, atoms, atoms) and directions (n, atoms, atoms, 3); an atom is out of its own reach."""
    vectors = positions.unsqueeze(1) - positions.unsqueeze(2) + 2 * REACH * torch.eye(ATOMS).to(positions).unsqueeze(-1)
    distances = vectors.norm(dim=-1)
    return distances, vectors / distances.unsqueeze(-1)


def true_energy(positions: Tensor) -> Tensor:
    """Positions (n, atoms, 3), in angstrom -> energies (n,), in eV."""
    distances, directions = bonds(positions)
    below = ((distances - REACH) / SIGMA).clamp(max=-0.01)
    pairs = 7.049556277 * (0.6022245584 * (distances / SIGMA) ** -4 - 1) * (1 / below).exp()
    near = (1.2 / below).exp()
    bent = (directions @ directions.mT + 1 / 3) ** 2 * near.unsqueeze(-1) * near.unsqueeze(-2)  # each two neighbours
    angles = bent.sum((-1, -2)) - bent.diagonal(dim1=-2, dim2=-1).sum(-1)
    return EPSILON * (pairs.sum((1, 2)) + 21.0 * angles.sum(1)) / 2


def simulate(num_clusters: int, num_seen: int = 5) -> TensorDataset:
    """Return positions, energies and forces of hot clusters, each seen several times (Brownian motion, in float64)."""
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 2.4], dtype=torch.float64)] * 3)
    positions = corners + 0.3 * torch.randn(num_clusters, ATOMS, 3, dtype=torch.float64)
    seen = []
    for time in range(1, 51 + 50 * num_seen):
        energies = true_energy(positions.requires_grad_())
        forces, positions = -torch.autograd.grad(energies.sum(), positions)[0], positions.detach()
        if time > 50 and time % 50 == 0:
            seen.append((positions.float(), energies.detach().float(), forces.float()))
        positions = positions + (0.002 * forces + (0.004 * HEAT) ** 0.5 * torch.randn_like(forces)).clamp(-0.2, 0.2)
    return TensorDataset(*(torch.cat(each) for each in zip(*seen, strict=True)))


class Potential(nn.Module):
    """Positions (n, atoms, 3) -> energies (n,), and forces as positions. By moment tensors (Shapeev 2016): an atom sees
    the lengths of weighted sums over its neighbours, of directions and their products. No rotation changes them.
    """

    def __init__(self, width: int = 64, channels: int = 16) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))  # of the energies
        self.register_buffer("shells", torch.linspace(1.7, REACH, 16))
        self.radial = nn.Linear(16, channels, bias=False)
        hidden = nn.Linear(3 * channels, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        self.atom = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # also where the loss needs none
            positions = positions.detach().requires_grad_()
            distances, directions = bonds(positions)
            fading = (1 - (distances / REACH) ** 2).clamp(min=0) ** 3
            shells = (-((distances.unsqueeze(-1) - self.shells) ** 2) / (2 * 0.17**2)).exp()
            weights = self.radial(shells * fading.unsqueeze(-1)).mT  # (n, atoms, channels, neighbours)
            products = (directions.unsqueeze(-1) * directions.unsqueeze(-2)).flatten(-2)
            vectors, matrices = ((weights @ each).square().sum(-1) for each in (directions, products))
            energies = self.mean + self.atom(torch.cat((weights.sum(-1), vectors, matrices), -1)).sum((1, 2))
            return energies, -torch.autograd.grad(energies.sum(), positions, create_graph=True)[0]


def draw(model: Potential, test_set: TensorDataset, path: Path) -> None:
    """Draw the forces of the network over the true ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no figure: it needs matplotlib")
    positions, _, forces = test_set[:200]
    found = model(positions.to(model.mean.device))[1].detach().cpu()
    axes = (figure := Figure((4, 4), layout="constrained")).subplots()
    axes.plot(forces.flatten(), found.flatten(), ".", markersize=1)
    axes.set(xlabel="true force (eV/Å)", ylabel="force of the network (eV/Å)")
    figure.savefig(path)
    return print(f"figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: few clusters, five epochs")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32, help="clusters")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=5e-3, help="at the beginning")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--force-weight", type=float, default=1.0, help="of the forces in the loss")
    parser.add_argument("--run-dir", default="runs/forces")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    clusters, epochs = (40, 5) if arguments.quick else (200, arguments.epochs)

    run = unisono.Run(arguments.run_dir, seed=arguments.seed, overwrite=arguments.overwrite)
    train_set, test_set = simulate(clusters), simulate(clusters // 4)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    model = Potential().to(run.device)
    model.mean += train_set.tensors[1].mean().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train_loader))
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for _ in run.epochs(epochs):
        for step in run.steps(train_loader, microbatches=arguments.microbatches):
            for positions, energies, forces in step:
                predicted, pushed = model(positions)
                loss = F.mse_loss(predicted, energies) / ATOMS + arguments.force_weight * F.mse_loss(pushed, forces)
                loss.backward()
            optimizer.step()
            scheduler.step()

    def measure(batch: list[Tensor]) -> dict[str, Tensor]:
        """Sum the squares of errors: of forces, of forces of 0, of energies, of their mean."""
        (predicted, pushed), (_, energies, forces) = model(batch[0]), batch
        errors = pushed - forces, forces, predicted - energies, model.mean - energies
        return {"squares": torch.stack([each.detach().double().square().sum() for each in errors])}

    squares = run.evaluate(DataLoader(test_set, batch_size=50), measure)["squares"] / len(test_set)
    if run.is_main:
        force, zero, energy, mean = (squares / torch.tensor([3 * ATOMS, 3 * ATOMS, ATOMS**2, ATOMS**2])).sqrt()
        print(f"test force error {force:.4f} eV/Å ({zero:.4f} where none is predicted)", end=", ")
        print(f"energy error {1000 * energy:.2f} meV an atom ({1000 * mean:.2f} by the mean)")
        if run.directory is not None:
            draw(model, test_set, run.directory / "forces.png")


if __name__ == "__main__":
    main()
