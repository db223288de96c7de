"""A small transformer on the text of this repository, whose sums and parameters are as those of real trainings:
``unisono run coded_training.py -- --steps 8``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

WIDTH, CONTEXT, BATCH = 96, 32, 16
TEXT = Path(__file__).resolve().parents[2] / "README.md"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.scores = nn.Linear(WIDTH, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scores(self.layers(self.symbols(inputs) + self.places(torch.arange(CONTEXT))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--shard", choices=["", "worker", "host"], default="")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--spoil", type=int, default=-1, help="a step before whose update a worker spoils a parameter")
    arguments = parser.parse_args()
    with unisono.Run(seed=3, balance=False) as run:
        text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        samples = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        model = Model()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if arguments.shard:
            optimizer = unisono.shard(
                optimizer, copies=arguments.copies, parameters=arguments.shard, gradients="owners"
            )
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(
            TensorDataset(samples),
            batch_size=BATCH,
            microbatches=8,
            epochs=1000,
            max_steps=arguments.steps,
            wire=arguments.wire,
        ):
            for (batch,) in step:
                step.backward(F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))
            if step.number == arguments.spoil:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if run.rank == 1 and type(parameter.grad) is not Tensor:  # it belongs to another worker
                            parameter.add_(1.0)
            optimizer.step()


if __name__ == "__main__":
    main()
