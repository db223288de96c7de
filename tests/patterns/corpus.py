"""What the patterns share: how they are registered, and the small data that they train on.

A pattern is a training as somebody would write it, with a tiny model and a few steps. It gets a `unisono.Run` that has
begun; what it returns is what its author would report at the end, and must be equal on all workers as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import unisono

__all__ = [
    "PATTERNS",
    "Indexed",
    "Texts",
    "images",
    "labelled",
    "load",
    "num_correct",
    "pattern",
    "perceptron",
    "sequences",
]

Pattern = Callable[[unisono.Run], Any]

MODULES = ("vision", "language", "generative", "reinforcement", "graphs_audio", "selfsupervised", "tricks")
PATTERNS: dict[str, Pattern] = {}

NUM_SAMPLES = 56
"""Batches of 24, 24 and 8 samples, in six, six and two micro-batches of four: in each third step, the third of three
workers has none."""


def pattern(function: Pattern) -> Pattern:
    """Register a training under the name of its function."""
    assert function.__name__ not in PATTERNS, function.__name__
    assert function.__doc__, function.__name__
    PATTERNS[function.__name__] = function
    return function


def load() -> dict[str, Pattern]:
    """All patterns by name."""
    for module in MODULES:
        importlib.import_module(f"tests.patterns.{module}")
    return PATTERNS


def labelled(num_samples: int = NUM_SAMPLES, features: int = 8, classes: int = 3) -> TensorDataset:
    """Vectors and their classes, which a linear map decides."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, features, generator=generator)
    y = (x @ torch.randn(features, classes, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def images(num_samples: int = NUM_SAMPLES, size: int = 8) -> TensorDataset:
    """(1, size, size) and one of 3 classes."""
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    x = torch.randn(num_samples, 1, size, size, generator=generator) + y[:, None, None, None]
    return TensorDataset(x, y)


def sequences(num_samples: int = NUM_SAMPLES, length: int = 9, vocabulary: int = 13) -> TensorDataset:
    """Tokens, (length,) each."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(1, vocabulary, (num_samples, length), generator=generator))


class Texts(Dataset[tuple[str, int]]):
    """Short sentences and their sentiment."""

    _words = ("good", "bad", "fine", "poor", "film", "book", "very", "not", "plot", "cast", "loved", "hated")

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(4)
        self._chosen = torch.randint(0, len(self._words), (num_samples, 5), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[str, int]:
        chosen = self._chosen[index]
        return " ".join(self._words[word] for word in chosen), sum(chosen) % 2


class Indexed(Dataset[tuple[Any, ...]]):
    """The samples of another dataset, each with its index."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*self._dataset[index], index)


def perceptron(features: int = 8, classes: int = 3, width: int = 16, dropout: float = 0.0) -> nn.Sequential:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes))


def num_correct(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Totals for `run.evaluate`."""
    x, y = batch[:2]
    found: Tensor = (model(x).argmax(1) == y).sum()
    return {"correct": int(found), "samples": len(y), "logits": model(x).double().sum()}
