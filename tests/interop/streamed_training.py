"""A training over streams of other libraries: ``unisono run streamed_training.py -- KIND FOLDER``.

Each process writes which samples it has read into a file of FOLDER, in their order.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono

M, BATCH_SIZE, STEPS = 4, 256, 24
NUM_SAMPLES = BATCH_SIZE * STEPS
NUM_SHARDS = 48
PER_SHARD = NUM_SAMPLES // NUM_SHARDS


class Source:
    """Samples that are found by their index, and notes of those that were read."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, int]:
        with (Path(self._folder) / f"read-{os.getpid()}").open("a") as file:
            file.write(f"{number}\n")
        return {"number": number}


def nodes(folder: str) -> Any:
    from torchdata.nodes import Loader, MapStyleWrapper

    source = Source(folder)
    return unisono.Streams(
        lambda stream, num_streams, epoch: Loader(
            MapStyleWrapper(map_dataset=source, sampler=range(stream, NUM_SAMPLES, num_streams))
        ),
        shuffle=20,
    )


def loader(folder: str) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    source = Source(folder)
    return unisono.Streams(
        lambda stream, num_streams, epoch: StatefulDataLoader(
            source, batch_size=None, sampler=range(stream, NUM_SAMPLES, num_streams)
        )
    )


def _shards(folder: str, shards: list[int]) -> Iterator[dict[str, int]]:
    source = Source(folder)
    for shard in shards:
        for number in range(PER_SHARD * shard, PER_SHARD * (shard + 1)):
            yield source[number]


def huggingface(folder: str, *, shuffle: int = 0) -> Any:
    import datasets

    given = {"folder": folder, "shards": list(range(NUM_SHARDS))}
    data = datasets.IterableDataset.from_generator(_shards, gen_kwargs=given)
    return data.shuffle(seed=1, buffer_size=shuffle) if shuffle else data


def webdataset(folder: str) -> Any:
    import webdataset

    return webdataset.WebDataset(
        [str(Path(folder) / f"{shard}.tar") for shard in range(NUM_SHARDS)], shardshuffle=False
    ).map(_numbered)


def _numbered(sample: dict[str, Any]) -> dict[str, int]:
    return {"number": int(sample["txt"])}


def write_shards(folder: Path) -> None:
    """Write the samples as WebDataset has them."""
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(PER_SHARD * shard, PER_SHARD * (shard + 1)):
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:05}.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


KINDS: dict[str, Callable[[str], Any]] = {
    "nodes": nodes,
    "loader": loader,
    "huggingface": huggingface,
    "shuffled": partial(huggingface, shuffle=100),
    "webdataset": webdataset,
}


def train(run: unisono.Run, data: Any) -> list[int]:
    """Return the samples that all workers have seen, in their order within each step."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found: list[int] = []
    for step in run.steps(data, batch_size=BATCH_SIZE, microbatches=M, max_steps=STEPS):
        for batch in step:
            number: Tensor = batch["number"]
            rows = torch.linspace(0, 1, 6) * number[:, None] / NUM_SAMPLES
            F.cross_entropy(model(rows), number % 4).backward()
            step.add(seen=F.one_hot(number, NUM_SAMPLES).sum(0))
        optimizer.step()
        found += step.totals["seen"].nonzero().flatten().tolist()
    return found


def main() -> None:
    kind, folder = sys.argv[1:]
    policy = unisono.Checkpoints(every_steps=18)
    # Nobody reads a stream because it is faster, or only to compare a micro-batch.
    with unisono.Run(seed=3, checkpoint=policy, balance=False, deterministic=False) as run:
        train(run, KINDS[kind](folder))


if __name__ == "__main__":
    main()
