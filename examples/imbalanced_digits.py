"""An image classifier for rare classes: it learns from 140 zeros, but only 3 nines, and draws the nines more often.

    python examples/imbalanced_digits.py                        # alone
    unisono run examples/imbalanced_digits.py --workers 4       # on four workers: the same bits

The script's DataLoader has a `WeightedRandomSampler`. The library reads its weights, and draws by them as a function of
the seed and the epoch, so all workers draw the same. With --uniform, an epoch has every picture once instead.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import unisono

MOST = 140  # pictures of the digit 0 to learn from
FALL = 0.65  # of each digit so many times as many as of the one before


def load() -> tuple[TensorDataset, TensorDataset, Tensor]:
    """Return the training set, the test set, and the number of training pictures of each digit, (10,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (n, 1, 8, 8) in [0, 1]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    train = torch.cat([train[labels[train] == digit][: round(MOST * FALL**digit)] for digit in range(10)])
    sizes = labels[train].bincount()
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]), sizes


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 10),
    )


def count_right(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Count the pictures of each digit, and those of them that the scores (n, 10) get right: (10,) each."""
    right = labels[scores.argmax(1) == labels]
    return {"right": right.bincount(minlength=10), "seen": labels.bincount(minlength=10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--uniform", action="store_true", help="draw every picture once in an epoch, for comparison")
    parser.add_argument("--run-dir", default="runs/imbalanced_digits")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    arguments = parser.parse_args()
    train_set, test_set, sizes = load()
    weights = (1 / sizes)[train_set.tensors[1]]
    sampler = None if arguments.uniform else WeightedRandomSampler(weights.tolist(), num_samples=len(train_set))
    train_loader = DataLoader(train_set, arguments.batch_size, sampler=sampler, shuffle=arguments.uniform)
    test_loader = DataLoader(test_set, batch_size=120)

    run = unisono.Run(
        arguments.run_dir,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        checkpoint=unisono.Checkpoints(every_steps=arguments.checkpoint_every),
    )
    model = network().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    run.track(model=model, optimizer=optimizer)

    def count(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return count_right(model(images), labels)

    for epoch in run.epochs(arguments.epochs):
        for step in run.steps(train_loader, microbatches=arguments.microbatches):
            for images, labels in step:
                scores = model(images)
                loss = F.cross_entropy(scores, labels)
                loss.backward()
                step.add(**count_right(scores, labels))
            optimizer.step()
        tested = run.evaluate(test_loader, count)
        right, drawn, accuracy = run.totals["right"], run.totals["seen"], tested["right"] / tested["seen"]  # (10,) each
        if run.is_main:
            print(f"epoch {epoch}: {drawn.min()} to {drawn.max()} drawn of each digit", end=", ")
            print(f"{right.sum() / drawn.sum():.2%} of them right; {accuracy.mean():.2%} right in test")

    if run.is_main:
        print("pictures:", *(f"{size:5}" for size in sizes))
        print("right:   ", *(f"{share:5.0%}" for share in accuracy))
        print(f"test accuracy {accuracy.mean():.2%} (mean over the digits; {tested['seen'].sum()} pictures)")


if __name__ == "__main__":
    main()
