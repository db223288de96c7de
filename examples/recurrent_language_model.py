"""An LSTM that learns English, byte by byte, from the documentation of Python, by truncated backpropagation.

    python examples/fetch_data.py english                               # once: 11 MB of text into ./data
    python examples/recurrent_language_model.py                         # alone
    unisono run examples/recurrent_language_model.py --workers 2        # on two workers: the same bits

The text is cut into streams that are read side by side: every step reads a short piece of each stream. Gradients end
at the end of a piece. The LSTM's state is carried over to the next piece of the stream, which another worker may read.
With --forget, every piece begins with an empty state instead, and the model learns less.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import unisono

SECTIONS = ("tutorial", "howto", "faq", "reference")
HELD_OUT = 10  # every tenth document is tested on, not trained on
TEST_LENGTH = 1024  # bytes that are read at once when testing
State = tuple[Tensor, Tensor]  # of an LSTM: (1, n, width) each


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


class Pieces(Dataset[tuple[Tensor, Tensor, int]]):
    """The first pieces of all streams, then all second ones ...: bytes and their successors, (length,); the stream."""

    def __init__(self, text: bytes, num_streams: int, length: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._num_streams = num_streams
        self._length = length
        self._num_pieces = (len(text) - 1) // (num_streams * length)  # of a stream

    def __len__(self) -> int:
        return self._num_pieces * self._num_streams

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        piece, stream = divmod(index, self._num_streams)
        start = (stream * self._num_pieces + piece) * self._length
        text = self._text[start : start + self._length + 1].long()
        return text[:-1], text[1:], stream


class Documents(Dataset[Tensor]):
    """Whole documents: (length,) each."""

    def __init__(self, documents: list[bytes]) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self._documents[index]), dtype=torch.uint8).long()


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor, state: State | None) -> tuple[Tensor, State]:
        """(n, length) and the state before it (None: empty) -> scores (n, length, 256) and the state after it."""
        seen, state = self.lstm(self.bytes(text), state)
        return self.head(self.dropout(seen)), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="streams")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=4e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data", type=Path, default=Path("data/english"))
    parser.add_argument("--length", type=int, default=16, help="bytes of a piece")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--forget", action="store_true", help="begin every piece with an empty state, for comparison")
    parser.add_argument("--run-dir", default="runs/recurrent_language_model")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS")
    arguments = parser.parse_args()
    documents, test_documents = read_documents(arguments.data)
    pieces = Pieces(b"".join(documents), arguments.batch_size, arguments.length)
    train_loader = DataLoader(pieces, batch_size=arguments.batch_size, shuffle=False)
    test_loader = DataLoader(Documents(test_documents), batch_size=1)

    run = unisono.Run(
        arguments.run_dir,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        checkpoint=unisono.Checkpoints(every_steps=arguments.checkpoint_every),
    )
    model = Recurrent(arguments.width).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=arguments.lr, total_steps=arguments.epochs * len(train_loader) + 1, pct_start=0.1
    )
    states = unisono.Carried(tuple(torch.zeros(2, 1, arguments.batch_size, arguments.width, device=run.device)), dim=1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, states=states)

    for epoch in run.epochs(arguments.epochs):
        states[:] = 0  # every stream begins anew
        for step in run.steps(train_loader, microbatches=arguments.microbatches):
            for text, following, stream in step:
                scores, states[stream] = model(text, None if arguments.forget else states[stream])
                loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
                loss.backward()
                step.add(nats=loss * following.numel(), bytes=following.numel())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if run.is_main:
            print(f"epoch {epoch}: {run.totals['nats'] / run.totals['bytes'] / math.log(2):.4f} bits per byte")

    def measure(document: Tensor) -> dict[str, float]:
        """Read a document, (1, length), from its beginning to its end."""
        nats, state = 0.0, None
        for start in range(0, document.shape[1] - 1, TEST_LENGTH):
            text = document[0, start : start + TEST_LENGTH + 1]
            scores, state = model(text[None, :-1], state)
            nats += F.cross_entropy(scores[0], text[1:], reduction="sum").item()
        return {"nats": nats, "bytes": document.shape[1] - 1}

    totals = run.evaluate(test_loader, measure)
    bits = totals["nats"] / totals["bytes"] / math.log(2)
    if run.is_main:
        print(f"test loss {bits:.4f} bits per byte ({totals['bytes']:.0f} bytes of {len(test_documents)} documents)")


if __name__ == "__main__":
    main()
