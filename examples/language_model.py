"""A small transformer that learns English, byte by byte, from the documentation of Python.

    python examples/fetch_data.py english                   # once: 11 MB of text into ./data
    python examples/language_model.py                       # alone
    unisono run examples/language_model.py --workers 2      # on two workers: the same bits

A sample is a window of one document. The last window of a document is shorter, and what it lacks is masked, so the
micro-batches have different numbers of tokens: each weighs as many tokens as it predicts, and the sum is divided once.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unisono

SECTIONS = ("tutorial", "howto", "faq", "reference")
HELD_OUT = 10  # every tenth document is tested on, not trained on
MASKED = -100  # cross_entropy's ignore_index


def read_documents(data: Path) -> tuple[list[bytes], list[bytes]]:
    """The documents to train on and those to test on."""
    paths = sorted(path for section in SECTIONS for path in (data / section).glob("**/*.rst.txt"))
    if not paths:
        sys.exit(
            f"{data} has no documents. `python examples/fetch_data.py english` fetches them; "
            "where you have them elsewhere, name the folder with --data."
        )
    documents = [path.read_bytes() for path in paths]
    test = documents[::HELD_OUT]
    return [document for number, document in enumerate(documents) if number % HELD_OUT], test


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Bytes and the bytes that follow them, (length,) each. Windows do not cross documents; the rest is masked."""

    def __init__(self, documents: list[bytes], length: int) -> None:
        self._length = length
        self._documents = [torch.frombuffer(bytearray(document), dtype=torch.uint8) for document in documents]
        self._places = [
            (number, start)
            for number, document in enumerate(documents)
            for start in range(0, len(document) - 1, length)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, start = self._places[index]
        text = self._documents[number][start : start + self._length + 1].long()
        short = self._length + 1 - len(text)
        return F.pad(text[:-1], (0, short)), F.pad(text[1:], (0, short), value=MASKED)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width / heads) each
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight  # tied
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places)))


def loss_of(model: nn.Module, text: Tensor, following: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy over the tokens that are not masked, in nats."""
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten(), ignore_index=MASKED, reduction=reduction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="windows")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=3e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data", type=Path, default=Path("data/english"))
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--documents", type=int, help="train and test on the first so many documents only")
    parser.add_argument("--run-dir", default="runs/language_model")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    arguments = parser.parse_args()
    train_documents, test_documents = read_documents(arguments.data)
    train_set = Windows(train_documents[: arguments.documents], arguments.length)
    test_set = Windows(test_documents[: arguments.documents], arguments.length)

    with unisono.Run(arguments.run_dir, seed=arguments.seed, overwrite=arguments.overwrite) as run:
        model = Transformer(arguments.length, arguments.width, arguments.depth, heads=4).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=arguments.lr,
            total_steps=arguments.epochs * -(-len(train_set) // arguments.batch_size),
            pct_start=0.1,
        )
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        for step in run.steps(
            train_set,
            batch_size=arguments.batch_size,
            microbatches=arguments.microbatches,
            epochs=arguments.epochs,
        ):
            for text, following in step:
                loss = loss_of(model, text, following)
                step.backward(loss, weight=int((following != MASKED).sum()))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step.log(lr=scheduler.get_last_lr()[0])
            scheduler.step()

        def measure(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            text, following = batch
            model.eval()
            return {"nats": loss_of(model, text, following, "sum"), "tokens": (following != MASKED).sum()}

        totals = run.evaluate(test_set, measure, batch_size=64)
        bits = totals["nats"] / totals["tokens"] / math.log(2)
        if run.is_main:
            print(
                f"test loss {bits:.4f} bits per byte ({totals['tokens']:.0f} bytes of {len(test_documents)} documents)"
            )


if __name__ == "__main__":
    main()
