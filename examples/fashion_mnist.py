"""Fashion-MNIST: a convolutional network with BatchNorm, dropout and random crops on 60,000 pictures of clothes.

python examples/fetch_data.py fashion-mnist             # once: 31 MB into ./data
python examples/fashion_mnist.py                        # alone
unisono run examples/fashion_mnist.py --workers 2       # on two workers: the same bits
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unisono

MEAN, DEVIATION = 0.2860, 0.3530  # of all pixels of the training set
BORDER = 2


def read_idx(path: Path) -> Tensor:
    """A file of unsigned bytes in IDX format: 0, 0, 8 (the type), the number of dimensions, the sizes, the data."""
    if not path.is_file():
        sys.exit(
            f"{path} is missing. `python examples/fetch_data.py fashion-mnist` fetches it; "
            "where you have the files elsewhere, name their folder with --data."
        )
    content = gzip.decompress(path.read_bytes())
    sizes = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(content[3])]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


class Clothes(Dataset[tuple[Tensor, int]]):
    """Pictures (1, 28, 28) and labels. For training, every picture is moved by up to two pixels and perhaps mirrored.

    The library sets the generators before each sample, from the seed, the epoch and the sample's number: the same
    pictures whoever loads them.
    """

    def __init__(self, data: Path, part: str, *, augment: bool) -> None:
        images = read_idx(data / f"{part}-images-idx3-ubyte.gz")
        self._images = F.pad(images, (BORDER,) * 4).unsqueeze(1)  # (n, 1, 32, 32), the border is black
        self._labels = read_idx(data / f"{part}-labels-idx1-ubyte.gz").tolist()
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top = random.randint(0, 2 * BORDER) if self._augment else BORDER
        left = random.randint(0, 2 * BORDER) if self._augment else BORDER
        image = self._images[index, :, top : top + 28, left : left + 28]
        if self._augment and random.random() < 0.5:
            image = image.flip(-1)
        return (image / 255 - MEAN) / DEVIATION, self._labels[index]


def block(num_in: int, num_out: int) -> list[nn.Module]:
    return [nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()]


def network() -> nn.Module:
    return nn.Sequential(
        *block(1, 24),
        nn.MaxPool2d(2),
        *block(24, 48),
        *block(48, 48),
        nn.MaxPool2d(2),
        *block(48, 96),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(96 * 3 * 3, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=4e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data", type=Path, default=Path("data/fashion-mnist"))
    parser.add_argument("--samples", type=int, help="train on the first so many pictures only")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load pictures, for each worker")
    parser.add_argument("--run-dir", default="runs/fashion_mnist")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    train_set: Dataset[tuple[Tensor, int]] = Clothes(arguments.data, "train", augment=True)
    test_set = Clothes(arguments.data, "t10k", augment=False)
    num_samples = min(arguments.samples or len(train_set), len(train_set))  # type: ignore[arg-type]
    train_set = torch.utils.data.Subset(train_set, range(num_samples))

    with unisono.Run(arguments.run_dir, seed=arguments.seed, overwrite=arguments.overwrite) as run:
        model = network().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=arguments.lr,
            total_steps=arguments.epochs * -(-num_samples // arguments.batch_size),
        )
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        for step in run.steps(
            train_set,
            batch_size=arguments.batch_size,
            microbatches=arguments.microbatches,
            epochs=arguments.epochs,
            loader_workers=arguments.loader_workers,
        ):
            for images, labels in step:
                loss = F.cross_entropy(model(images), labels)
                step.backward(loss, weight=len(labels))
            optimizer.step()
            step.log(lr=scheduler.get_last_lr()[0])
            scheduler.step()

        def count(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | int]:
            images, labels = batch
            model.eval()
            scores = model(images)
            loss = F.cross_entropy(scores, labels, reduction="sum")
            return {"right": (scores.argmax(1) == labels).sum(), "loss": loss, "seen": len(labels)}

        totals = run.evaluate(test_set, count, batch_size=500)
        accuracy, loss = totals["right"] / totals["seen"], totals["loss"] / totals["seen"]
        if run.is_main:
            print(f"test accuracy {accuracy:.2%}, loss {loss:.4f} ({totals['seen']:.0f} pictures)")


if __name__ == "__main__":
    main()
