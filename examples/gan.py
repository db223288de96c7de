"""A GAN that learns to write digits, from the 1,437 pictures to train on that come with scikit-learn.

    python examples/gan.py                          # alone
    unisono run examples/gan.py --workers 4         # on four workers: the same bits

Every step passes over its batch twice: first for the discriminator, then (`step.again()`) for the generator, which
has to deceive the discriminator that the first pass has updated.

Both networks are told which digit a picture shows. So there is a number for how good the generator is: the share of
real test pictures that a classifier reads right if it has seen nothing but generated ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

NOISE = 16  # numbers that the generator begins with
NUM_WRITTEN = 2000  # pictures for the classifier
NUM_SAVED = 100


def load() -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the pictures to train on, one fifth to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (n, 1, 8, 8) in [-1, 1]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Generator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, NOISE)
        self.layers = nn.Sequential(
            nn.Linear(2 * NOISE, width * 4 * 4, bias=False),
            nn.Unflatten(1, (width, 4, 4)),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        return self.layers(torch.cat((noise, self.digits(labels)), 1))


class Discriminator(nn.Module):
    """Scores pictures, (n,): above 0 for what looks like a real picture of this digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 2 * width),
            nn.LeakyReLU(0.2),
        )
        self.real = nn.Linear(2 * width, 1)
        self.digits = nn.Embedding(10, 2 * width)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.layers(images)
        return self.real(features).squeeze(1) + (features * self.digits(labels)).sum(1)


def save_sheet(images: Tensor, path: Path) -> None:
    """Write (rows * 10, 1, 8, 8) pictures as one, ten in a row, in the format PGM."""
    framed = F.pad(images, (1, 1, 1, 1), value=-1)
    sheet = framed.view(-1, 10, 10, 10).transpose(1, 2).flatten(0, 1).flatten(1)  # (rows * 10, 100)
    pixels = ((sheet + 1) * 127.5).round().to(torch.uint8).repeat_interleave(4, 0).repeat_interleave(4, 1)
    height, width = pixels.shape
    path.write_bytes(f"P5 {width} {height} 255\n".encode() + pixels.cpu().numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the discriminator; the generator has twice as much")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--run-dir", default="runs/gan")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    arguments = parser.parse_args()
    train_set, test_set = load()
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=120)

    run = unisono.Run(
        arguments.run_dir,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        checkpoint=unisono.Checkpoints(every_steps=arguments.checkpoint_every),
    )
    generator = Generator(arguments.width).to(run.device)
    discriminator = Discriminator(arguments.width).to(run.device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2 * arguments.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=arguments.lr, betas=(0.5, 0.999))
    run.track(generator=generator, discriminator=discriminator, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
    shown_noise = torch.randn(NUM_WRITTEN, NOISE, device=run.device)
    shown_labels = torch.arange(NUM_WRITTEN, device=run.device) % 10

    for _ in run.epochs(arguments.epochs):
        for step in run.steps(train_loader, microbatches=arguments.microbatches):
            for images, labels in step:
                noise = torch.randn(len(images), NOISE, device=run.device)
                with torch.no_grad():
                    written = generator(noise, labels)
                real, false = discriminator(images, labels), discriminator(written, labels)
                loss = F.softplus(-real).mean() + F.softplus(false).mean()
                loss.backward()
                step.add(fooled=(false > 0).sum(), written=len(false))
            optimizer_d.step()

            for images, labels in step.again():
                noise = torch.randn(len(images), NOISE, device=run.device)  # the same as in the first pass
                loss = F.softplus(-discriminator(generator(noise, labels), labels)).mean()
                loss.backward()
            optimizer_g.step()
            step.log(fooled=step.totals["fooled"] / step.totals["written"])

    generator.eval()
    with torch.no_grad():
        shown = generator(shown_noise, shown_labels)

    def read(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | int]:
        """Read every picture as the digit of the written picture that is nearest to it."""
        images, labels = batch
        nearest = torch.cdist(images.flatten(1), shown.flatten(1)).argmin(1)
        return {"right": (shown_labels[nearest] == labels).sum(), "seen": len(labels)}

    totals = run.evaluate(test_loader, read)
    if run.is_main:
        print(f"read by written digits: {totals['right'] / totals['seen']:.2%} ({totals['seen']:.0f} real pictures)")
        if run.directory is not None:
            save_sheet(shown[:NUM_SAVED], run.directory / "written.pgm")
            print(f"some of them: {run.directory / 'written.pgm'}")


if __name__ == "__main__":
    main()
