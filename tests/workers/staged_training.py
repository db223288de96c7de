"""A training of a moment with a model in stages: ``unisono run staged_training.py --workers 2x2 -- --kind cnn``.

With ``--gates DIR``, every worker stops at the head of step N while a test holds gate N (`gates`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.gates import wait_at

NUM_SAMPLES = 70
BATCH_SIZE = 32


class Block(nn.Module):
    """A transformer's: attention and two layers, with dropout."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout, self.num_heads = nn.Dropout(0.1), num_heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        found = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Embedding(nn.Module):
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.words(x) + self.places
        return found


class Skip(nn.Module):
    """Passes its input on beside what it computes: two tensors go to the next stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = torch.relu(self.layer(x))
        return (found if before is None else found + before), x


class Join(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        found: Tensor = self.layer(x + before)
        return found


class Rare(nn.Module):
    """Has a layer that some steps use, one that some micro-batches use, and one that none does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.often, self.rarely, self.never = (nn.Linear(width, width) for _ in range(3))
        self.is_used = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.rarely(x) if self.is_used else x
        return torch.relu(x + self.often(x) if x.sum() > 0 else x)


def convolution(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.Dropout2d(0.1)]
    return nn.Sequential(*layers)


BLOCK = {"*.qkv": "columns:3", "*.out": "rows", "*.mlp.0": "columns", "*.mlp.2": "rows", "*.words": "vocabulary"}
PLANS = {
    "mlp": {"0.0": "columns", "0.3": "rows"},
    "cnn": {"4": "rows"},
    "transformer": {**BLOCK, "3.1": "columns"},
    "tied": {**BLOCK, "3": "vocabulary"},
}
"""How layers are cut into shards."""


def cut_into_shards(kind: str, modules: list[Any], shards: int) -> list[Any]:
    """Return the modules of a model with layers that are cut."""
    made = [module if isinstance(module, nn.Module) else module() for module in modules]
    if kind == "mlp":  # between two stages no tensor is in shards
        made = [nn.Sequential(*made[:4]), *made[4:]]
    return list(unisono.parallelize(nn.Sequential(*made), PLANS[kind], shards=shards))


def parts(kind: str, draw: torch.Generator) -> tuple[list[Any], TensorDataset]:
    """Return the modules of a model, and its data."""
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=draw)
    if kind == "mlp":
        layers = [nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3)]
        return layers, TensorDataset(torch.randn(NUM_SAMPLES, 12, generator=draw), labels)
    if kind == "skip":
        layers = [nn.Linear(12, 16), Skip(16), Skip(16), Join(16)]
        layers[0].requires_grad_(False)
        return layers, TensorDataset(torch.randn(NUM_SAMPLES, 12, generator=draw), labels)
    if kind == "rare":
        layers = [Rare(12), Rare(12), Rare(12), nn.Linear(12, 3)]
        return layers, TensorDataset(torch.randn(NUM_SAMPLES, 12, generator=draw), labels)
    if kind == "cnn":
        layers = [convolution(1, 6), convolution(6, 6), convolution(6, 6), nn.Flatten(), nn.Linear(6 * 36, 3)]
        return layers, TensorDataset(torch.randn(NUM_SAMPLES, 1, 6, 6, generator=draw), labels)
    if kind == "tied":
        first, last = Embedding(32, 10, 16), nn.Linear(16, 32, bias=False)
        last.weight = first.words.weight
        layers = [first, Block(16, 4), Block(16, 4), last]
        return layers, TensorDataset(*(torch.randint(0, 32, (NUM_SAMPLES, 10), generator=draw) for _ in range(2)))
    words, nexts = (torch.randint(0, 32, (NUM_SAMPLES, 10), generator=draw) for _ in range(2))
    made = [lambda: Embedding(32, 10, 16), lambda: Block(16, 4), lambda: Block(16, 4)]
    return [*made, lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))], TensorDataset(words, nexts)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="mlp")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--shards", type=int, default=1, help="into which layers are cut")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--unbalanced", action="store_true", help="all groups compute as many micro-batches")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--weighted", action="store_true", help="micro-batches count differently, and some not at all")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--frozen", type=int, nargs="*", default=[], help="modules that are not trained")
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    arguments = parser.parse_args()
    every = arguments.checkpoint_every
    checkpoint = unisono.Checkpoints(every_steps=every, keep=arguments.keep) if every else None
    with unisono.Run(seed=3, checkpoint=checkpoint, balance=not arguments.unbalanced) as run:
        modules, data = parts(arguments.kind, torch.Generator().manual_seed(1))
        if arguments.shards > 1:
            modules = cut_into_shards(arguments.kind, modules, arguments.shards)
        model = unisono.Stages(*modules, cuts=arguments.stages).to(run.device)
        for index in arguments.frozen:
            model.get_submodule(str(index)).requires_grad_(False)
        optimizer = OPTIMIZERS[arguments.optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        def loss_of(inputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
            found = model(inputs)
            step.add(right=(unisono.whole(found).argmax(-1) == labels).sum())
            weight = int(labels.sum()) % 4 if arguments.weighted else labels.numel()
            return F.cross_entropy(found.flatten(0, -2), labels.flatten()), weight

        def totals_of(batch: list[Tensor]) -> dict[str, Tensor]:
            found = model(batch[0])
            return {"loss": F.cross_entropy(found.flatten(0, -2), batch[1].flatten(), reduction="sum")}

        steps = run.steps(
            data,
            batch_size=BATCH_SIZE,
            microbatches=arguments.microbatches,
            epochs=99,
            max_steps=arguments.steps,
            wire=arguments.wire,
        )
        for step in steps:
            wait_at(arguments.gates / str(step.number))
            for each in model.modules():
                if isinstance(each, nn.BatchNorm2d) and step.number in (1, 4):
                    each.train(step.number == 4)
                if isinstance(each, nn.Dropout) and step.number == 1:
                    each.p = 0.3
                if isinstance(each, Rare):
                    each.is_used = step.number % 3 == 1
            for _ in range(arguments.passes):
                step.compute(loss_of)
            if arguments.clip:
                step.log(norm=unisono.clip_grad_norm_(model.parameters(), arguments.clip))
            optimizer.step()
            scheduler.step()
            step.log(right=step.totals["right"])
            if arguments.evaluate and step.number % 2:
                found = run.evaluate(data, totals_of, batch_size=16)
                step.log(loss_of_all=found["loss"])


if __name__ == "__main__":
    main()
