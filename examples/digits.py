"""Handwritten digits: a small convolutional network on the 1,797 pictures that come with scikit-learn.

python examples/digits.py                           # alone
unisono run examples/digits.py --workers 4          # on four workers: the same bits
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


def load() -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the pictures to train on, one fifth to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (n, 1, 8, 8) in [0, 1]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--run-dir", default="runs/digits")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    train_set, test_set = load()

    with unisono.Run(arguments.run_dir, seed=arguments.seed, overwrite=arguments.overwrite) as run:
        model = network().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        for step in run.steps(
            train_set,
            batch_size=arguments.batch_size,
            microbatches=arguments.microbatches,
            epochs=arguments.epochs,
        ):
            for images, labels in step:
                loss = F.cross_entropy(model(images), labels)
                step.backward(loss, weight=len(labels))
            optimizer.step()
            scheduler.step()
            step.log(lr=scheduler.get_last_lr()[0])

        def count(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | int]:
            images, labels = batch
            model.eval()
            return {"right": (model(images).argmax(1) == labels).sum(), "seen": len(labels)}

        totals = run.evaluate(test_set, count, batch_size=120)
        if run.is_main:
            print(f"test accuracy {totals['right'] / totals['seen']:.2%} ({totals['seen']:.0f} pictures)")


if __name__ == "__main__":
    main()
