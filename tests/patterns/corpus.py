"""What the patterns share: how they are registered, and the small data that they train on.

A pattern is a training as somebody would write it, with a tiny model and a few steps. It gets a `unisono.Run` that has
begun; what it returns is what its author would report at the end, and must be equal on all workers as well.

Where a weight is concerned the pattern returns numbers, and says by `plain` what PyTorch alone computes: one process,
the whole batch, no micro-batches. `learn` is that loop. What both begin with is fixed, whatever the seed is (`still`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono

__all__ = [
    "PATTERNS",
    "Indexed",
    "Texts",
    "images",
    "labelled",
    "learn",
    "load",
    "num_correct",
    "pattern",
    "perceptron",
    "sequences",
    "still",
    "weights_of",
]

Training = Callable[[unisono.Run], Any]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Pattern:
    """A training, and how it is run besides alone and on a team."""

    train: Training
    legs: tuple[str, ...] = ()
    """Names of `tests.patterns.measure.LEGS`."""
    plain: Callable[[], Any] | None = None
    """What PyTorch alone returns in its place."""


MODULES = (
    "vision",
    "language",
    "generative",
    "reinforcement",
    "graphs_audio",
    "selfsupervised",
    "tricks",
    "modes_and_state",
    "weights_and_frameworks",
)
PATTERNS: dict[str, Pattern] = {}

NUM_SAMPLES = 56
"""Batches of 24, 24 and 8 samples, in six, six and two micro-batches of four: in each third step, the third of three
workers has none."""


def pattern(
    function: Training | None = None, *, legs: tuple[str, ...] = (), plain: Callable[[], Any] | None = None
) -> Any:
    """Register a training under the name of its function: ``@pattern``, or ``@pattern(legs=..., plain=...)``."""

    def register(function: Training) -> Training:
        assert function.__name__ not in PATTERNS, function.__name__
        assert function.__doc__, function.__name__
        PATTERNS[function.__name__] = Pattern(function, legs, plain)
        return function

    return register if function is None else register(function)


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


def still(model: M) -> M:
    """The model with weights that no seed changes."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def weights_of(model: nn.Module) -> Tensor:
    """All parameters, to be compared with those of another training."""
    return parameters_to_vector(model.parameters()).detach()


def learn(
    model: nn.Module,
    loss_of: Callable[..., Any],
    data: Dataset[Any],
    *,
    epochs: int = 2,
    lr: float = 0.1,
    **loader: Any,
) -> Tensor:
    """Train as PyTorch alone does, in the order of the data, and return the weights."""
    optimizer = SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=24, **loader):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
    return weights_of(model)
