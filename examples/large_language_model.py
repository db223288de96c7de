"""A transformer that no process has to hold: cut into stages, each of which is made where it is trained.

    python examples/large_language_model.py                           # alone: all stages in one process
    unisono run examples/large_language_model.py --workers 1x4        # four processes, a fourth of the stages each
    unisono run examples/large_language_model.py --workers 2x4        # two such groups: the same bits
    unisono run examples/large_language_model.py --workers 1x4 -- --stages 1 --shards 4    # a fourth of each layer

It learns Python, byte by byte, from the modules of Python's own standard library, so nothing has to be fetched. For P
parameters in float32 a training holds 4 P bytes of parameters, 8 P of AdamW's states, and 4 P for each sum of gradients
that is under way. With ``--workers AxS`` a process has a part of all that, and activations of its own stages only.
``--recompute`` keeps the inputs of the blocks instead of all that they compute. Stages and shards are part of the
recipe: other ones give other bits; how many processes carry them does not.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import unisono

HELD_OUT = 10  # every tenth module is tested on, not trained on


def read_modules(count: int) -> tuple[bytes, bytes]:
    """The first modules of the standard library: the text to train on, and that to test on."""
    texts = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:count]]
    return b"".join(text for number, text in enumerate(texts) if number % HELD_OUT), b"".join(texts[::HELD_OUT])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Bytes and the bytes that follow them, (length,) each."""

    def __init__(self, text: bytes, length: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * self._length :][: self._length + 1].long()
        return window[:-1], window[1:]


class Embedding(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.bytes(text) + self.places


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.heads, self.recompute = width // 32, recompute
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.recompute else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width / heads) each
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


def head(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))


PLANS: dict[Callable[..., nn.Module], dict[str, str]] = {
    Embedding: {"bytes": "vocabulary"},
    Block: {"queries_keys_values": "columns:3", "attended": "rows", "mlp.0": "columns", "mlp.2": "rows"},
    head: {"1": "columns"},
}


def in_shards(shards: int, make: Callable[..., nn.Module], *arguments: int) -> nn.Module:
    """A module, with layers that are cut into shards."""
    return unisono.parallelize(make(*arguments), PLANS[make], shards=shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="windows")
    parser.add_argument("--microbatches", type=int, default=16, help="cuts of a batch: more than stages, or many wait")
    parser.add_argument("--stages", type=int, default=4, help="cuts of the model: the most processes a group can have")
    parser.add_argument("--shards", type=int, default=1, help="cuts of the layers: a power of two")
    parser.add_argument("--lr", type=float, default=3e-4, help="at its highest")
    parser.add_argument("--modules", type=int, default=100, help="read the first so many modules")
    parser.add_argument("--test-windows", type=int, default=256, help="test on the first so many windows")
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=14)
    parser.add_argument("--recompute", action="store_true", help="compute blocks again in the backward, to save memory")
    parser.add_argument("--run-dir", default="runs/large_language_model")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    train_text, test_text = read_modules(arguments.modules)
    train_set = Windows(train_text, arguments.length)
    test_set = Windows(test_text[: arguments.test_windows * arguments.length + 1], arguments.length)

    with unisono.Run(arguments.run_dir, seed=7, overwrite=arguments.overwrite) as run:
        # Functions that make modules: a process never has more than one module of the other stages.
        made = partial(partial, in_shards, arguments.shards)
        model = unisono.Stages(
            made(Embedding, arguments.length, arguments.width),
            *[made(Block, arguments.width, arguments.recompute)] * arguments.depth,
            made(head, arguments.width),
            cuts=arguments.stages,
        ).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, arguments.steps, pct_start=0.1)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        if run.is_main:
            print(f"{sum(one.numel() for one in model.parameters()):,} parameters, {arguments.stages} stages")

        def loss_of(text: Tensor, following: Tensor) -> Tensor:
            return F.cross_entropy(model(text).flatten(0, 1), following.flatten())

        for step in run.steps(
            train_set,
            batch_size=arguments.batch_size,
            microbatches=arguments.microbatches,
            epochs=arguments.steps,  # at most: an epoch has a step at least
            max_steps=arguments.steps,
        ):
            step.compute(loss_of)
            unisono.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        def totals_of(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {"nats": loss_of(*batch) * batch[1].numel(), "bytes": torch.tensor(batch[1].numel())}

        totals = run.evaluate(test_set, totals_of, batch_size=8)
        if run.is_main:
            bits = totals["nats"] / totals["bytes"] / math.log(2)
            print(f"test loss {bits:.4f} bits per byte ({totals['bytes']:.0f} bytes)")


if __name__ == "__main__":
    main()
