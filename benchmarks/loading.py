"""Samples per second from tar shards: streams of Unisono beside torch's DataLoader, WebDataset and
mosaicml-streaming.

python -m benchmarks.loading                # a minute or two
python -m benchmarks.loading --quick

All sides have the same number of loader processes, the same samples (raw pixels that are made floats), shuffle within
1000 samples, and make batches of the same size. They take turns; what counts is the time from the first batch to the
last. mosaicml-streaming takes part where it can be imported, with the samples in its own format.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import unisono
from benchmarks.report import print_table, write_json
from unisono.core.orders import Sequential
from unisono.core.stream_plan import StreamCursor
from unisono.engine.microbatch.data import Loading
from unisono.engine.microbatch.shards import samples_of
from unisono.engine.microbatch.streamfetcher import StreamFetcher

SHAPE = (3, 96, 96)
WINDOW = 1000
M = 8


def decode(sample: dict[str, Any]) -> Tensor:
    pixels = torch.from_numpy(numpy.frombuffer(sample["bin"], dtype=numpy.uint8).copy())
    return pixels.view(SHAPE).float().div_(255).sub_(0.5)


def write_shards(folder: Path, num_samples: int, num_shards: int) -> list[str]:
    draw = numpy.random.default_rng(1)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as archive:
            for number in range(shard, num_samples, num_shards):
                content = draw.integers(0, 256, SHAPE, dtype=numpy.uint8).tobytes()
                entry = tarfile.TarInfo(f"{number:06}.bin")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return [str(folder / f"{shard:03}.tar") for shard in range(num_shards)]


def with_unisono(shards: list[str], batch: int, processes: int, shuffle: int = WINDOW // M) -> Iterator[Any]:
    data = unisono.TarShards(shards, shuffle=shuffle, transform=decode)
    lengths = data.lengths(M)
    cursor = StreamCursor(
        order=Sequential(sum(lengths), max(lengths) * M, "streams"),
        batch_size=batch * M,
        microbatches=M,
        seed=1,
        lengths=lengths,
    )

    def requests() -> Iterator[tuple[int, int, int]]:
        for step in range(done[0], cursor.steps_per_epoch):
            yield from ((step, 0, leaf) for leaf in range(cursor.position(step).num_leaves))

    done = [0]
    loading = Loading(processes=processes)
    fetcher = StreamFetcher(data, cursor, device=torch.device("cpu"), loading=loading, upcoming=requests)
    try:
        for step, _, leaf in list(requests()):
            done[0] = step
            yield fetcher.fetch(step, leaf)
    finally:
        fetcher.close()


class _Plain(IterableDataset[Tensor]):
    """The same reader of tar files, without shuffling: what a DataLoader can do at best."""

    def __init__(self, shards: list[str]) -> None:
        self._shards = shards

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        for path in self._shards[info.id :: info.num_workers]:
            yield from map(decode, samples_of(path))


def with_dataloader(shards: list[str], batch: int, processes: int) -> Iterable[Any]:
    return DataLoader(_Plain(shards), batch_size=batch, num_workers=processes)


def with_webdataset(shards: list[str], batch: int, processes: int) -> Iterable[Any]:
    import webdataset

    data = webdataset.WebDataset(shards, shardshuffle=False).shuffle(WINDOW // processes, seed=1).map(decode)
    return DataLoader(data, batch_size=batch, num_workers=processes)


def with_mosaic(shards: list[str], batch: int, processes: int) -> Iterable[Any]:
    import streaming

    class Decoded(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Tensor:
            return decode(super().__getitem__(index))

    folder = Path(shards[0]).parent / "mds"
    if not folder.exists():
        with streaming.MDSWriter(out=str(folder), columns={"bin": "bytes"}, size_limit=1 << 24) as writer:
            for path in shards:
                for sample in samples_of(path):
                    writer.write({"bin": sample["bin"]})
    data = Decoded(local=str(folder), shuffle=True, shuffle_block_size=WINDOW, batch_size=batch)
    return DataLoader(data, batch_size=batch, num_workers=processes)


SIDES: dict[str, Callable[[list[str], int, int], Iterable[Any]]] = {
    "unisono": with_unisono,
    "unisono unshuffled": partial(with_unisono, shuffle=0),
    "DataLoader": with_dataloader,
    "webdataset": with_webdataset,
    "mosaicml-streaming": with_mosaic,
}


def rate(batches: Iterable[Any]) -> float:
    """Return samples per second, from the arrival of the first batch on."""
    arrived = iter(batches)
    next(arrived)
    begin, number = time.perf_counter(), 0
    for one in arrived:
        number += len(one)
    return number / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--processes", default="2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_samples = 2_000 if arguments.quick else 12_000
    turns = 3 if arguments.quick else arguments.turns
    rows, figures, runs = list[list[str]](), dict[str, float](), list[dict[str, Any]]()
    left_out = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder), num_samples, 16)
        for processes in map(int, arguments.processes.split(",")):
            left_out |= {
                name: reason
                for name in arguments.sides.split(",")
                if (reason := _missing(name, shards, arguments.batch, processes))
            }
            sides = [name for name in arguments.sides.split(",") if name not in left_out]
            found: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(turns):
                for name in sides if turn % 2 == 0 else reversed(sides):
                    found[name].append(rate(SIDES[name](shards, arguments.batch, processes)))
            for name in sides:
                ratios = [own / other for own, other in zip(found["unisono"], found[name], strict=True)]
                figures[f"{name}, {processes} processes"] = statistics.median(ratios)
                runs.append({"side": name, "processes": processes, "rates": found[name], "ratios": ratios})
                rows.append(
                    [
                        str(processes),
                        name,
                        f"{statistics.median(found[name]):,.0f}",
                        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    ]
                )
    print_table(["loader processes", "side", "samples/s (median)", "unisono / side"], rows)
    if arguments.json:
        write_json(arguments.json, figures, runs, left_out)


def _missing(name: str, shards: list[str], batch: int, processes: int) -> str:
    """Return why a side takes no part; "" if it does."""
    try:
        for _ in itertools.islice(SIDES[name](shards, batch, processes), 2):
            pass
    except ImportError as error:
        print(f"{name} takes no part: {error}")
        return f"{name} is not installed: {error}"
    return ""


if __name__ == "__main__":
    main()
