"""The names that a Python block of the documentation may read without making them: one function for each name.

What a function needs of the other names are its parameters. Everything is small: a block runs in a moment.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import unisono

__all__ = ["IMPORTED", "make"]

IMPORTED = {
    "torch": torch,
    "unisono": unisono,
    "nn": nn,
    "F": F,
    "time": time,
    "DataLoader": DataLoader,
    "TensorDataset": TensorDataset,
    "WeightedRandomSampler": WeightedRandomSampler,
}
"""What the documentation takes for imported."""
NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 512, 16, 10


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(NUM_FEATURES, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))


def run() -> unisono.Run:
    return unisono.Run("runs/prelude", seed=7, overwrite=True)


def model() -> nn.Module:
    return Net()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


def train_set() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=draw)
    return TensorDataset(images, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=draw))


def test_set(train_set: TensorDataset) -> TensorDataset:
    return train_set


def data(train_set: TensorDataset) -> TensorDataset:
    return train_set


def train_loader(train_set: TensorDataset) -> DataLoader[Any]:
    return DataLoader(train_set, batch_size=256, shuffle=True)


def loader(train_loader: DataLoader[Any]) -> DataLoader[Any]:
    return train_loader


def test_loader(test_set: TensorDataset) -> DataLoader[Any]:
    return DataLoader(test_set, batch_size=100)


def count_correct(model: nn.Module) -> Any:
    def count(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | int]:
        images, labels = batch
        return {"right": (model(images).argmax(1) == labels).sum(), "seen": len(labels)}

    return count


def count(count_correct: Any) -> Any:
    return count_correct


def deadline() -> float:
    return math.inf


def tokens() -> dict[str, int]:
    return {"seen": 0}


def train() -> Any:
    return lambda epoch: None


def test() -> Any:
    return lambda: None


def decode_jpeg() -> Any:
    return lambda content: torch.full((NUM_FEATURES,), float(len(content)))


def augment() -> Any:
    return lambda image: image


def decode(decode_jpeg: Any) -> Any:
    return lambda sample: (decode_jpeg(sample["jpg"]), int(sample["cls"]))


def texts() -> list[str]:
    return ["x" * (1 + 7 * index % 40) for index in range(NUM_SAMPLES)]


def weights() -> Tensor:
    return torch.linspace(1, 2, NUM_SAMPLES)


def generator() -> nn.Module:
    return nn.Linear(64, NUM_FEATURES)


def discriminator() -> nn.Module:
    return nn.Linear(NUM_FEATURES, 1)


def optimizer_g(generator: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(generator.parameters())


def optimizer_d(discriminator: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(discriminator.parameters())


def discriminator_loss() -> Any:
    return lambda real, fake: F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss() -> Any:
    return lambda fake: F.softplus(-fake).mean()


def make(names: Iterable[str]) -> dict[str, Any]:
    """Return values for these names, and for what they need.

    Raises:
        KeyError: there is no such name here; it names all that are missing.
    """
    made: dict[str, Any] = {}
    makers = {
        name: value
        for name, value in vars(sys.modules[__name__]).items()
        if isinstance(value, types.FunctionType) and value.__module__ == __name__ and name != "make"
    }
    own = {**IMPORTED, "Net": Net}

    def value_of(name: str) -> Any:
        if name not in made:
            needs = inspect.signature(makers[name]).parameters
            made[name] = makers[name](*(value_of(other) for other in needs))
        return made[name]

    unknown = sorted(set(names) - set(makers) - set(own))
    if unknown:
        raise KeyError(", ".join(unknown))
    if "run" in names:
        value_of("run")  # first: it sets the seed
    for name in sorted(set(names) & set(makers)):
        value_of(name)
    return {**own, **made}
