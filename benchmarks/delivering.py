"""The time in which updated parameters come from their owners to everybody, by each exchange and by torch.distributed.

python -m benchmarks.delivering                                 # 100 MB in 300 tensors
python -m benchmarks.delivering --workers 2 --megabytes 400

Each member owns an equal part of the tensors, and everybody else gets them: what a step with a shared optimizer state
exchanges. All ways take turns in the same processes, so each ratio is taken between neighbours in time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import print_table, write_json
from unisono.engine.exchange import Exchange, Parcel, host, network, two_level
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.pages import WorkerPage

LIMIT_S = 120.0
BUILDERS: dict[str, Callable[[Context], Exchange]] = {
    "shared": host.build,
    "gloo": network.build,
    "two-level": two_level.build,
}


def tensors_of(num_bytes: int, number: int) -> list[Tensor]:
    """Like a model's: a third of them large, the others small."""
    small = 512
    large = max(1, number // 3)
    each = max(1, (num_bytes // 4 - small * (number - large)) // large)
    return [torch.zeros(each if index % 3 == 0 else small) for index in range(number)]


def _exchange(kind: str, rank: int, size: int, folder: str) -> Exchange:
    page = WorkerPage()
    store = dist.FileStore(f"{folder}/pages-{kind}", -1)
    store.set(str(rank), page.address)
    half = size // 2
    hosts = (range(half), range(half, size)) if kind == "two-level" else (range(size),)
    return BUILDERS[kind](
        Context(
            generation=1,
            rank=rank,
            hosts=hosts,
            device=torch.device("cpu"),
            timeout_s=LIMIT_S,
            store=lambda name: dist.FileStore(f"{folder}/{kind}-{name}", -1),
            page=page,
            pages=[store.get(str(each)).decode() for each in range(size)],
        )
    )


def _worker(rank: int, size: int, folder: str, options: argparse.Namespace, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/default", rank=rank, world_size=size)
    tensors = tensors_of(options.megabytes << 20, options.tensors)
    owners = [(index // 3) % size for index in range(len(tensors))]
    others = {owner: tuple(each for each in range(size) if each != owner) for owner in range(size)}
    parcels = [Parcel(owner, others[owner], tensor) for owner, tensor in zip(owners, tensors, strict=True)]
    flat = torch.zeros(size * (sum(t.numel() for t in tensors) // size))

    def broadcast_each() -> None:
        for owner, tensor in zip(owners, tensors, strict=True):
            dist.broadcast(tensor, owner)

    def all_gather_flat() -> None:
        part = len(flat) // size
        dist.all_gather_single(flat, flat[rank * part : (rank + 1) * part].clone())

    ways: dict[str, Callable[[], object]] = {}
    exchanges = {}
    for kind in options.exchanges.split(","):
        if kind == "two-level" and size < 4:
            continue
        exchange = exchanges[kind] = _exchange(kind, rank, size, folder)
        ways[f"{kind}: deliver"] = partial(exchange.deliver, parcels)
    ways["torch: gloo broadcasts"] = broadcast_each
    ways["torch: gloo all_gather, flat"] = all_gather_flat
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + options.turns):
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            way()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - started)
    for exchange in exchanges.values():
        exchange.close()
    dist.destroy_process_group()
    if rank == 0:
        told.send(times)


def measure(size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each way, turn by turn."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="unisono-benchmark-") as folder:
        workers = [context.Process(target=_worker, args=(rank, size, folder, options, theirs)) for rank in range(size)]
        for worker in workers:
            worker.start()
        theirs.close()
        try:
            if not ours.poll(LIMIT_S + 60):
                raise RuntimeError("the workers did not end in time")
            times: dict[str, list[float]] = ours.recv()
            for worker in workers:
                worker.join(LIMIT_S)
            return times
        finally:
            for worker in workers:
                worker.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--exchanges", default=",".join(BUILDERS), metavar="A,B")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    options = parser.parse_args(arguments)
    rows, figures, runs = [], {}, []
    for size in options.workers:
        times = measure(size, options)
        base = times["torch: gloo all_gather, flat"]
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            figures[f"{name.replace(': ', '.').replace(' ', '_')}.{size}"] = 1000 * statistics.median(seconds)
            rows.append([str(size), name, f"{1000 * statistics.median(seconds):.1f}", f"{ratio:.2f}"])
        runs.append({"workers": size, "seconds": times})
    print_table(("workers", "way", "ms", "to all_gather"), rows)
    if options.json:
        write_json(Path(options.json), figures, runs)


if __name__ == "__main__":
    main()
