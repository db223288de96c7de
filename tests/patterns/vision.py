"""Classifiers of images, as timm and the usual repositories train them."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset, default_collate

import unisono
from tests.patterns.corpus import Indexed, images, labelled, num_correct, pattern, perceptron


class SmallNet(nn.Module):
    def __init__(self, drop_path: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.rates = [drop_path * (number + 1) / 3 for number in range(3)]
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for block, rate in zip(self.blocks, self.rates, strict=True):
            branch = F.relu(block(x))
            if self.training and rate:
                kept = torch.rand(len(x), 1, 1, 1) >= rate
                branch = branch * kept / (1 - rate)
            x = x + branch
        return self.head(x.mean((2, 3)))


@pattern
def mixup_in_the_collate_function(run: unisono.Run) -> Any:
    """Mixes each batch with itself in reverse, by a lambda that the collate function draws from numpy."""

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        lam = float(numpy.random.beta(0.8, 0.8))
        return lam * x + (1 - lam) * x.flip(0), y, y.flip(0), lam

    model = SmallNet()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2, collate=collate):
        for x, y, other, lam in step:
            logits = model(x)
            loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, other)
            step.backward(loss, weight=len(y))
        optimizer.step()
    return run.evaluate(images(), partial(num_correct, model), batch_size=10)


class CutMix:
    """A box of each image is replaced by that of another one."""

    def __init__(self, alpha: float = 1.0, seed: int = 42) -> None:
        self.alpha, self.rng = alpha, numpy.random.default_rng(seed)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        lam = self.rng.beta(self.alpha, self.alpha)
        side = int(8 * (1 - lam) ** 0.5)
        top, left = (int(self.rng.integers(0, 9 - side)) for _ in range(2))
        mixed = x.clone()
        mixed[:, :, top : top + side, left : left + side] = x.flip(0)[:, :, top : top + side, left : left + side]
        share = 1 - side * side / 64
        hot = F.one_hot(y, 3).float()
        return mixed, share * hot + (1 - share) * hot.flip(0)


@pattern
def cutmix_with_a_numpy_generator_of_its_own(run: unisono.Run) -> None:
    """Applies CutMix to each batch; the transform keeps a seeded numpy Generator."""
    model, cutmix = SmallNet(), CutMix()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            x, target = cutmix(x, y)
            step.backward(F.cross_entropy(model(x), target), weight=len(y))
        optimizer.step()


@pattern
def stochastic_depth_with_a_linear_schedule(run: unisono.Run) -> None:
    """Drops residual branches per sample, deeper ones more often, and sets the rate anew for every epoch."""
    model = SmallNet(drop_path=0.3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, 6)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2):
        model.rates = [0.3 * (step.epoch + 1) / 2 * (number + 1) / 3 for number in range(3)]
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, label_smoothing=0.1), weight=len(y))
        optimizer.step()
        scheduler.step()


@pattern
def layer_decay_with_adaptive_clipping(run: unisono.Run) -> None:
    """Gives earlier layers a smaller learning rate, and clips each gradient by the norm of its parameter."""
    model = SmallNet()
    layers = [model.stem, model.norm, *model.blocks, model.head]
    groups = [
        {"params": list(layer.parameters()), "lr": 0.01 * 0.75 ** (len(layers) - number)}
        for number, layer in enumerate(layers)
    ]
    optimizer = AdamW(groups, weight_decay=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        with torch.no_grad():
            for parameter in model.parameters():
                allowed = 0.01 * parameter.norm().clamp(min=1e-3)
                parameter.grad.mul_((allowed / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0))
        optimizer.step()


@pattern
def average_of_the_model_after_each_batch(run: unisono.Run) -> Any:
    """Updates the EMA of the weights in the batch loop, as timm's train_one_epoch does, and evaluates the EMA."""
    model = perceptron()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.1)
        optimizer.step()
    return run.evaluate(labelled(), partial(num_correct, average), batch_size=10)


@pattern
def pseudo_labels_in_eval_mode(run: unisono.Run) -> None:
    """Labels a noisy copy of each batch by the model in eval mode, and goes on with the next batch."""
    model = perceptron(dropout=0.3)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            model.eval()
            with torch.no_grad():
                guess = model(x).argmax(1)
            loss = loss + 0.3 * F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), guess)
            step.backward(loss, weight=len(y))
        optimizer.step()


@pattern
def eval_mode_left_on_after_validation(run: unisono.Run) -> float:
    """Validates after each step by a function of its own, which leaves the model in eval mode."""
    model = perceptron(dropout=0.3)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    held_x, held_y = labelled().tensors
    best = 0.0

    def validate() -> float:
        model.eval()
        with torch.no_grad():
            return float((model(held_x).argmax(1) == held_y).float().mean())

    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
        best = max(best, validate())
    return best


@pattern
def multi_scale_training_every_few_batches(run: unisono.Run) -> None:
    """Chooses another image size at random every four batches, as detectors of the YOLO family do."""
    model = SmallNet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    num_seen, size = 0, 8
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            if num_seen % 4 == 0:
                size = random.choice([6, 8, 10])
            num_seen += 1
            x = F.interpolate(x, size=(size, size), mode="nearest")
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


class CachedInMemory(Dataset[tuple[Tensor, Tensor]]):
    """Decodes and augments an image when it is read first."""

    def __init__(self) -> None:
        self.data = images()
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index not in self.cache:
            x, y = self.data[index]
            self.cache[index] = torch.roll(x, random.randrange(-2, 3), dims=2) + 0.1 * torch.randn_like(x), y
        return self.cache[index]


@pattern
def dataset_that_caches_augmented_images(run: unisono.Run) -> None:
    """Keeps the samples in memory once they were loaded, to load them faster in the next epoch."""
    model, data = SmallNet(), CachedInMemory()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=6, epochs=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Images of which brightness and contrast are jittered."""

    def __init__(self) -> None:
        self.x, self.y = images().tensors

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.x[index]
        image *= 1 + 0.2 * (torch.rand(()) - 0.5)
        image += 0.1 * torch.randn(())
        return image, self.y[index]


@pattern
def jitter_with_in_place_operators(run: unisono.Run) -> None:
    """Jitters brightness and contrast in the dataset with ``*=`` and ``+=``."""
    model, data = SmallNet(), Jittered()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=6, epochs=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def frozen_batch_norm_and_larger_images(run: unisono.Run) -> None:
    """Trains on small images first; from the second epoch on the images are larger and BatchNorm is in eval mode."""
    model = SmallNet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2):
        size = 6 if step.epoch == 0 else 8
        if step.epoch == 1:
            model.norm.eval()
            model.norm.requires_grad_(False)
        for x, y in step:
            x = F.interpolate(x, size=(size, size), mode="bilinear")
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def hard_examples_weigh_more(run: unisono.Run) -> None:
    """Remembers the last loss of every sample, and weights samples by it when they come again."""
    model, difficulty = perceptron(), torch.ones(56)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Indexed(labelled()), batch_size=24, microbatches=6, epochs=3):
        for x, y, index in step:
            losses = F.cross_entropy(model(x), y, reduction="none")
            step.backward((difficulty[index] * losses).mean(), weight=len(y))
            difficulty[index] = losses.detach()
        optimizer.step()


class Backbone(nn.Module):
    """Slowly trained, with a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(24, 3)

    def forward(self, x: Tensor, remembered: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.body(x)), remembered], 1))


def train_with_memory(run: unisono.Run, remember: Callable[[int, Tensor], Tensor], model: Backbone) -> None:
    """``remember(index, x)``: the features that the sample had when it was seen first."""
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Indexed(labelled()), batch_size=24, microbatches=6, epochs=3):
        for x, y, index in step:
            remembered = torch.stack([remember(int(number), one) for number, one in zip(index, x, strict=True)])
            step.backward(F.cross_entropy(model(x, remembered), y), weight=len(y))
        optimizer.step()


@pattern
def features_memoised_in_memory(run: unisono.Run) -> None:
    """Computes the features of a sample when it is seen first, and takes them from a dict from then on."""
    model, known = Backbone(), {}

    def remember(index: int, x: Tensor) -> Tensor:
        if index not in known:
            known[index] = torch.tanh(model.body(x)).detach()
        return known[index]

    train_with_memory(run, remember, model)


@pattern
def features_memoised_in_files(run: unisono.Run) -> None:
    """Computes the features of a sample when it is seen first, and takes them from a file from then on."""
    model = Backbone()
    folder = run.directory / "features"
    folder.mkdir(exist_ok=True)

    def remember(index: int, x: Tensor) -> Tensor:
        path = folder / f"{index}.pt"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            torch.save(torch.tanh(model.body(x)).detach(), part)
            part.replace(path)
        return torch.load(path)

    train_with_memory(run, remember, model)
