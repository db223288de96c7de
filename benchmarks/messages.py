"""What a processor spends on the sums that hosts exchange: for each byte, and for each message.

python -m benchmarks.messages                       # a minute
python -m benchmarks.messages --sizes 1,4,16 --hosts 2,4,8

Some members, each as if on a host of its own, add up sums of several sizes over the loopback device. The processor time
of a member for one exchange is fitted by ``bytes * a + messages * b``. Between many hosts it is the messages that take
the time, and `unisono.tools.plan.wires.MESSAGE_S` is this b.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import print_table, write_json
from unisono.core.plan import plan
from unisono.engine.exchange import TELEMETRY_BYTES, Share, combine, network
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.flat import FlatLayout
from unisono.engine.exchange.pages import WorkerPage
from unisono.tools.plan.wires import num_messages, sent_bytes

LIMIT_S = 120.0
EXCHANGES = 30
WARM_UP = 5


def _member(rank: int, size: int, megabytes: Sequence[int], folder: str, told: Any) -> None:
    torch.set_num_threads(1)
    page = WorkerPage()
    store = dist.FileStore(f"{folder}/pages", -1)
    store.set(str(rank), page.address)
    exchange = network.build(
        Context(
            generation=1,
            rank=rank,
            hosts=tuple(range(each, each + 1) for each in range(size)),
            device=torch.device("cpu"),
            timeout_s=LIMIT_S,
            store=lambda name: dist.FileStore(f"{folder}/{name}", -1),
            page=page,
            pages=[store.get(str(each)).decode() for each in range(size)],
        )
    )
    decided = plan(size, size)
    found = []
    for number in megabytes:
        exchange.prepare(FlatLayout([("w", torch.empty(number * 250_000))], []))
        spent = []
        for _ in range(EXCHANGES):
            (node,) = decided.nodes[rank]
            slot = exchange.slot()
            slot.memory.zero_()
            slot.scalars.fill_(1.0)
            exchange.all_gather(b"")
            before = time.process_time()
            combined = combine(exchange, Share(size, decided.nodes, {node: slot}), bytes(TELEMETRY_BYTES))
            spent.append(time.process_time() - before)
            exchange.release(combined.slot)
        found.append(statistics.median(spent[WARM_UP:]))
    exchange.all_gather(b"")
    exchange.close()
    told.put((rank, found))


def measured(size: int, megabytes: Sequence[int]) -> list[float]:
    """Return the processor time of an exchange of each size, the mean of the members, in seconds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        told: Any = context.Queue()
        members = [
            context.Process(target=_member, args=(rank, size, megabytes, folder, told), daemon=True)
            for rank in range(size)
        ]
        for member in members:
            member.start()
        try:
            found = [told.get(timeout=LIMIT_S)[1] for _ in members]
            for member in members:
                member.join(LIMIT_S)
        finally:
            for member in members:
                member.kill()
    return [statistics.fmean(each) for each in zip(*found, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4,16", metavar="MB,MB")
    parser.add_argument("--hosts", default="2,3,4,6,8", metavar="H,H")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    megabytes, sizes = ([int(each) for each in text.split(",")] for text in (options.sizes, options.hosts))
    rows, points, figures = [], [], dict[str, float]()
    for size in sizes:
        for number, seconds in zip(megabytes, measured(size, megabytes), strict=True):
            nbytes = number * 1_000_000
            points.append((sent_bytes(nbytes, size, 1), float(num_messages(nbytes, size, 1)), seconds))
            figures[f"cpu_ms.{number}mb.{size}"] = 1000 * seconds
            rows.append([str(size), str(number), f"{points[-1][1]:.0f}", f"{1000 * seconds:.2f}"])
    print_table(("hosts", "MB", "messages", "CPU ms of a member"), rows)
    known = torch.tensor(points, dtype=torch.float64)
    each_byte, each_message = torch.linalg.lstsq(known[:, :2], known[:, 2:]).solution.flatten().tolist()
    figures |= {"ns_a_byte": 1e9 * each_byte, "us_a_message": 1e6 * each_message}
    print(f"{1e9 * each_byte:.3f} ns a byte that is sent, {1e6 * each_message:.1f} us a message")
    if options.json:
        write_json(options.json, figures, [dict(zip(("sent", "messages", "s"), each, strict=True)) for each in points])


if __name__ == "__main__":
    main()
