"""Small models and the ways to train them: between them they use what PyTorch users use.

A `Recipe` is a whole training. It runs alone, in a team without a head, and as a script of two lines::

    from tests.workers.models import main

    main()      # python script.py cnn 6 RUN_DIRECTORY
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import unisono

__all__ = ["RECIPES", "Images", "Outcome", "Recipe", "bits_of"]

NUM_SAMPLES = 56
BATCH_SIZE = 24
"""56 samples: an epoch ends with a batch of 8, which M = 4, 6 and 8 cut into 6 + 2, 4 + 4 and 3 + 3 + 2."""

Losses = Iterable[tuple[Tensor, float | None]]


# -- data --------------------------------------------------------------------------------------------


def vectors(num_samples: int = NUM_SAMPLES, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """(12,) and one of 4 classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 12, generator=generator)
    y = torch.randint(0, 4, (num_samples,), generator=generator)
    return TensorDataset(x.to(dtype), y)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """(1, 6, 6), shifted, mirrored and made noisy at random, by all three generators that people use."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(2)
        self.images = torch.randn(num_samples, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 4, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, column = random.randrange(3), int(numpy.random.randint(3))
        image = self.images[index, :, row : row + 6, column : column + 6]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image + 0.1 * torch.randn(image.shape), self.labels[index]


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of 10 tokens, of which few or many or none are to be predicted."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 17, (11,), generator=generator)
        wanted = tokens[1:].clone()
        wanted[int(torch.randint(0, 11, (), generator=generator)) * (index % 5 > 0) :] = -100
        return {"tokens": tokens[:-1], "wanted": wanted}


# -- models ------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 33), nn.Linear(33, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.relu(self.first(x)))
        return result


class Rare(Mlp):
    """A layer that only some micro-batches use, and a parameter that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.unused = nn.Linear(12, 33), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if x[0, 0] > 0.5:
            hidden = hidden + self.rare(x)
        result: Tensor = self.last(F.relu(hidden))
        return result


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Dropout(0.3)
        self.second, self.last = nn.Conv2d(5, 6, 3), nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.conv(x))))
        result: Tensor = self.last(F.relu(self.second(x)).flatten(1))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(17, 16), nn.Parameter(0.1 * torch.randn(10, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.last = nn.Linear(16, 17)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(10), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.last(self.layer(self.embed(tokens) + self.place, self.mask, is_causal=True))
        return result


class Tied(nn.Module):
    """The embedding is the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.last = nn.Embedding(17, 12), nn.Linear(12, 12), nn.Linear(12, 17)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.mix(self.embed(tokens))))
        return result


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells, self.last = nn.Embedding(17, 8), nn.LSTM(8, 9, batch_first=True), nn.Linear(9, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.last(self.cells(self.embed(tokens))[0])
        return result


class Mixed(nn.Module):
    """A body in bfloat16, a norm in float32 and a head in float64: three kinds of sums in one slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 16, dtype=torch.bfloat16), nn.LayerNorm(16)
        self.last = nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.to(torch.bfloat16)).float())
        result: Tensor = self.last(F.gelu(hidden).double())
        return result


class Checkpointed(Cnn):
    """Computes its activations again in backward, dropout included."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = checkpoint(lambda y: self.second(self.drop(F.relu(y))), x, use_reentrant=False)
        result: Tensor = self.last(F.relu(x).flatten(1))
        return result


def frozen_mlp() -> Mlp:
    model = Mlp()
    model.first.weight.requires_grad_(False)
    return model


# -- losses ------------------------------------------------------------------------------------------


def classify(model: nn.Module, batch: Any) -> Losses:
    x, y = batch
    yield F.cross_entropy(model(x), y), None


def next_token(model: nn.Module, batch: Any) -> Losses:
    """The mean over the tokens that count; NaN where none does, which weight 0 leaves out."""
    wanted = batch["wanted"]
    loss = F.cross_entropy(model(batch["tokens"]).transpose(1, 2), wanted, ignore_index=-100)
    yield loss, float((wanted != -100).sum())


def two_losses(model: nn.Module, batch: Any) -> Losses:
    """The second one uses only a part of the model."""
    x, y = batch
    yield F.cross_entropy(model(x), y), len(y)
    yield 0.1 * model.first(x).square().mean(), len(y)


def autocast_losses(model: nn.Module, batch: Any) -> Losses:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield from classify(model, batch)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.01)


# -- recipes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What must be equal, bit for bit, on every member of every team."""

    final: dict[str, str]
    """Name of a tracked object -> hash of its state."""
    totals: dict[str, str]
    losses: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training."""

    model: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]] = vectors
    losses: Callable[[nn.Module, Any], Losses] = classify
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    scheduler: Callable[[Any], Any] | None = None
    clip: float | None = 1.0
    clipping: Callable[..., object] = nn.utils.clip_grad_norm_
    with_ema: bool = False
    with_scaler: bool = False
    thaws: bool = False
    """Everything is trained from the second step on, also what was frozen."""
    phases: int = 1
    wire: Literal["fp32", "bf16"] = "fp32"

    def train(self, run: unisono.Run, microbatches: int, **options: Any) -> Outcome:
        """Train it; ``options`` are of ``run.steps``."""
        model = self.model().to(run.device)
        optimizer = self.optimizer(
            [parameter for parameter in model.parameters() if parameter.requires_grad or self.thaws]
        )
        tracked: dict[str, Any] = {"model": model, "optimizer": optimizer}
        scheduler = self.scheduler(optimizer) if self.scheduler is not None else None
        scaler = (
            torch.amp.GradScaler(run.device.type, init_scale=1024.0, growth_interval=3) if self.with_scaler else None
        )
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if self.with_ema else None
        if average is not None:
            average.requires_grad_(False)
        tracked |= {"scheduler": scheduler, "scaler": scaler, "average": average}
        run.track(**{name: value for name, value in tracked.items() if value is not None})

        data, losses = self.data(), []
        if self.wire != "fp32":  # earlier versions, with which the bits are compared, know no wire
            options = {"wire": self.wire, **options}
        for _ in range(self.phases):
            for step in run.steps(data, batch_size=BATCH_SIZE, microbatches=microbatches, epochs=2, **options):
                if self.thaws and step.number == 1:
                    model.requires_grad_(True)
                for batch in step:
                    for loss, weight in self.losses(model, batch):
                        step.backward(loss, weight=weight, scaler=scaler)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if self.clip is not None:
                    self.clipping(model.parameters(), self.clip)
                if scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                if average is not None:
                    average.update_parameters(model)
                losses.append(step.loss)
                step.log(lr=optimizer.param_groups[0]["lr"])
            totals = run.evaluate(data, partial(self.measure, model), batch_size=10)
        return Outcome(
            final={name: bits_of(value.state_dict()) for name, value in tracked.items() if value is not None},
            totals={name: bits_of(value) for name, value in totals.items()},
            losses=bits_of(losses),
        )

    def measure(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Totals of all three kinds: a float, an int and a tensor."""
        found = [
            (loss.cpu().double() * (weight or 1.0), weight) for loss, weight in self.losses(model, batch) if weight != 0
        ]
        loss = sum((loss for loss, _ in found), torch.zeros((), dtype=torch.float64))
        return {"loss": loss, "losses": len(found), "both": torch.stack([loss, loss.square()])}


def bits_of(value: Any) -> str:
    """A hash of everything in a state, to the bit. It shares no code with the library's digests."""
    hashed = hashlib.sha256()
    for part in _parts(value, ""):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(value: Any, path: str) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{path} {value.dtype} {tuple(value.shape)} ".encode()
        if value.is_meta:  # a state that another worker has
            return
        yield bytes(value.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _parts(item, f"{path}.{place}")
    else:
        yield f"{path} {value!r} ".encode()


RECIPES = {
    "mlp": Recipe(model=Mlp),
    "cnn": Recipe(model=Cnn, data=Images),
    "transformer": Recipe(model=Transformer, data=Tokens, losses=next_token),
    "lstm": Recipe(model=Lstm, data=Tokens, losses=next_token),
    "rare": Recipe(model=Rare),
    "tied": Recipe(model=Tied, data=Tokens, losses=next_token),
    "frozen": Recipe(model=frozen_mlp),
    "thawing": Recipe(model=frozen_mlp, thaws=True),
    "bfloat16": Recipe(model=lambda: Mlp().to(torch.bfloat16), data=partial(vectors, dtype=torch.bfloat16)),
    "float64": Recipe(model=lambda: Mlp().double(), data=partial(vectors, dtype=torch.float64)),
    "mixed": Recipe(model=Mixed, clip=None),
    "channels last": Recipe(model=lambda: Cnn().to(memory_format=torch.channels_last), data=Images),
    "momentum": Recipe(
        model=Cnn,
        data=Images,
        optimizer=partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        scheduler=partial(StepLR, step_size=2),
    ),
    "fused": Recipe(
        model=Cnn,
        data=Images,
        optimizer=partial(AdamW, lr=0.01, fused=True),
        scheduler=partial(CosineAnnealingLR, T_max=6),
        with_ema=True,
    ),
    "two losses": Recipe(model=Mlp, losses=two_losses),
    "scaler": Recipe(model=Mlp, with_scaler=True),
    "autocast": Recipe(model=Mlp, losses=autocast_losses),
    "checkpointed": Recipe(model=Checkpointed, data=Images),
    "two phases": Recipe(model=Cnn, data=Images, phases=2),
}


def train_in(directory: str | os.PathLike[str], name: str, microbatches: int) -> Outcome:
    """A run as a script or a launched function makes it."""
    with unisono.Run(directory, seed=3, device="cpu") as run:
        return RECIPES[name].train(run, microbatches)


def main() -> None:
    name, microbatches, directory = sys.argv[1:]
    train_in(directory, name, int(microbatches))
