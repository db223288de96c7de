"""A training of a moment over streams: ``unisono run stream_training.py -- --shards DIR``.

Each step adds up which samples it has seen (``seen``, one number for each id), so that the journal says what was
trained on, whoever has computed it.
"""

from __future__ import annotations

import argparse
import io
import random
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, get_worker_info

import unisono

COUNTS = (13, 7, 22, 5)
"""Samples of each shard."""
NUM_SAMPLES = sum(COUNTS)
M, BATCH_SIZE = 4, 8
STEPS_PER_EPOCH = 6
"""Streams of 11, 12, 12 and 12 samples: six steps, of which the last is one sample short."""


def write_shards(folder: Path) -> str:
    number = 0
    for shard, count in enumerate(COUNTS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as archive:
            for _ in range(count):
                for ending, content in (("txt", str(number).encode()), ("meta.bin", bytes(600 + number))):
                    entry = tarfile.TarInfo(f"samples/{number:05}.{ending}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                number += 1
    return str(folder / "{000..003}.tar")


def decode(sample: dict[str, Any]) -> tuple[int, Tensor]:
    """The id of a sample, and an augmented input."""
    number = int(sample["txt"])
    return number, torch.linspace(number, 1, 6) / NUM_SAMPLES + 0.01 * torch.rand(6) + random.random()


def made(stream: int, num_streams: int, epoch: int) -> Iterator[dict[str, Any]]:
    assert get_worker_info() is None, "in a loader process it would give other samples than in the worker"
    numbers = list(range(NUM_SAMPLES))
    random.shuffle(numbers)
    for number in numbers[stream::num_streams]:
        yield {"txt": number}


class Iterated(IterableDataset[dict[str, Any]]):
    """Divided as the documentation of torch shows it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        assert info is not None
        return iter([{"txt": number} for number in range(info.id, NUM_SAMPLES, info.num_workers)])


def collate(samples: list[dict[str, Any]]) -> list[Tensor]:
    pairs = [decode(sample) for sample in samples]
    return [torch.tensor([number for number, _ in pairs]), torch.stack([row for _, row in pairs])]


def train(run: unisono.Run, data: Any, **options: Any) -> tuple[list[list[int]], nn.Module]:
    """By step, the ids of the samples that all workers have seen; and the model."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    found: list[list[int]] = []
    for step in run.steps(data, microbatches=M, **{"batch_size": BATCH_SIZE, **options}):
        for number, row in step:
            F.cross_entropy(model(row), number % 4).backward()
            step.add(seen=F.one_hot(number, NUM_SAMPLES).sum(0))
        optimizer.step()
        found.append([i for i, times in enumerate(step.totals["seen"].tolist()) for _ in range(times)])
    return found, model


def shards(pattern: str | Iterable[str], **options: Any) -> unisono.TarShards:
    return unisono.TarShards(pattern, **{"shuffle": 5, "transform": decode, **options})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", required=True)
    parser.add_argument("--loader-workers", type=int, default=0)
    arguments = parser.parse_args()
    with unisono.Run(seed=3, checkpoint=unisono.Checkpoints(every_steps=8)) as run:
        train(run, shards(arguments.shards), epochs=2, loader_workers=arguments.loader_workers)


if __name__ == "__main__":
    main()
