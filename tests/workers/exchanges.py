"""What the tests of the exchanges share: steps and what they have to give, members, and how these meet."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.house.toys.toy_exchange import StoreExchange
from tests.waiting import WAIT_S
from tests.workers.processes import (
    Seat,
    end_watching,
    num_descriptors,
    num_threads,
)
from unisono.core.coding_rules import Mode
from unisono.core.plan import plan
from unisono.core.tree import Node, leaf, root, schedule
from unisono.engine.exchange import TELEMETRY_BYTES, Combined, Exchange, Share, wire
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.context import Builder, Context
from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.exchange.host import SharedMemory
from unisono.engine.exchange.network import Network
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.exchange.shared_memory import futex_wait
from unisono.engine.exchange.two_level import TwoLevel
from unisono.engine.exchange.wire import release_abandoned
from unisono.engine.rounds.connect import EXCHANGES

CPU = torch.device("cpu")
KINDS = [
    ("alone", 1),
    ("shared", 2),
    ("shared", 3),
    ("shared", 8),
    ("gloo", 2),
    ("gloo", 3),
    ("gloo", 5),
    ("two-level", 3),
    ("two-level", 4),
    ("two-level", 5),
    ("store", 3),
]
every_kind = pytest.mark.parametrize(("kind", "size"), KINDS)
TEAMS = [("shared", 3), ("gloo", 3), ("two-level", 4)]
every_team = pytest.mark.parametrize(("kind", "size"), TEAMS)
BUILDERS: dict[str, Builder] = {"alone": lambda context: Alone(context.device), "store": StoreExchange, **EXCHANGES}
BLOCKING = {"_watch", "_await"}
"""Where an exchange waits, in shared memory and on a wire."""


class AlarmError(Exception):
    """What the tests interrupt with."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a caught error remembers maps memory."""
    yield
    end_watching()
    gc.collect()


# -- a step, and what it has to give -----------------------------------------------------------------


def layouts() -> list[FlatLayout]:
    """Several dtypes and buffers; another; one of several buckets and blocks; one that rounds, of several pieces."""
    parameters = [
        ("a", torch.empty(90, 701)),
        ("b", torch.empty(13, dtype=torch.float64)),
        ("c", torch.empty(5, dtype=torch.bfloat16)),
        ("d", torch.empty(0)),
        ("e", torch.empty(7, 3, dtype=torch.float16)),
    ]
    buffers = [
        ("n", torch.empty((), dtype=torch.int64)),
        ("m", torch.empty(7)),
        ("v", torch.empty(3, dtype=torch.float64)),
    ]
    return [
        FlatLayout(parameters, buffers),
        FlatLayout([("w", torch.empty(130))], []),
        FlatLayout([("w", torch.empty(2_500_000)), ("x", torch.empty(77))], buffers),
        FlatLayout([("w", torch.empty(400_000)), *parameters], buffers, rounds=True),
    ]


ROUNDING = 3
"""The layout that rounds."""

STEPS = [(0, 8), (0, 8), (0, 5), (0, 1), (1, 6), (1, 2), (2, 3), (0, 13), (3, 1), (3, 5), (3, 8), (3, 13), (3, 17)]
"""Which layout, and how many leaves: also fewer than members."""


def fill(slot: Slot, step: int, index: int) -> None:
    """Compute one leaf: its gradients, weight, bitmap and buffers."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    for view in [*slot.gradients, *slot.buffers]:
        value = torch.randn(view.shape, generator=generator)
        view.copy_(value if view.is_floating_point() else value * 100)
    slot.scalars.copy_(torch.tensor([1 + index % 3, 0.1 * index], dtype=torch.float64))
    slot.used.copy_(torch.arange(slot.used.numel()) % 2 + index)


def plus(left: Slot, right: Slot) -> None:
    for piece in left.layout.pieces(0, left.layout.num_rows):
        left.typed(piece.dtype)[piece.start : piece.stop] += right.typed(piece.dtype)[piece.start : piece.stop]


def formed(slot: Slot, node: Node, num_leaves: int) -> None:
    """Do to a node what whoever forms it does at once: nothing, or round its float32 sums to bfloat16."""
    level, nodes = 0, num_leaves
    while nodes > 8:
        level, nodes = level + 1, (nodes + 1) // 2
    if slot.layout.rounded_rows and node.level >= level:
        for view in slot.gradients:
            if view.dtype == torch.float32:
                view.copy_(view.bfloat16().float())


def compute(exchange: Exchange, step: int, todo: Sequence[int], num_leaves: int, nodes: dict[Node, Slot]) -> None:
    """Add these leaves to this member's nodes, as a step does."""
    for index in todo:
        nodes[leaf(index, num_leaves)] = exchange.slot()
        fill(nodes[leaf(index, num_leaves)], step, index)
        formed(nodes[leaf(index, num_leaves)], leaf(index, num_leaves), num_leaves)
    for left, right, parent in schedule(nodes, num_leaves)[0]:
        nodes[parent], spare = nodes.pop(left), nodes.pop(right)
        plus(nodes[parent], spare)
        formed(nodes[parent], parent, num_leaves)
        exchange.release(spare)


def share_of(exchange: Exchange, step: int, num_leaves: int) -> Share:
    decided, nodes = plan(exchange.size, num_leaves), dict[Node, Slot]()
    compute(exchange, step, decided.ranges[exchange.rank], num_leaves, nodes)
    return Share(num_leaves, decided.nodes, nodes)


def telemetry_of(rank: int, step: int) -> bytes:
    """Any bytes, zeros among them."""
    return bytes((100 * step + 10 * rank + index) % 256 for index in range(TELEMETRY_BYTES))


@dataclass(frozen=True)
class Outcome:
    """A combine's result, small enough to send."""

    digest: int
    content: str

    @classmethod
    def of(cls, combined: Combined) -> Outcome:
        return cls(combined.digest, content(combined.slot))


def content(slot: Slot) -> str:
    rows = slot.rows(0, slot.layout.num_rows)
    return hashlib.sha256(ctypes.string_at(rows.data_ptr(), rows.numel())).hexdigest()


_expected: dict[tuple[int, int, int], Outcome] = {}


def expected(layout: int, step: int, num_leaves: int) -> Outcome:
    """The plain reference: leaves by themselves, added in tree order, divided once. No exchange, no chunks."""
    key = (layout, step, num_leaves)
    if key not in _expected:
        shape = layouts()[layout]
        slots = {}
        for index in range(num_leaves):
            slots[leaf(index, num_leaves)] = Slot(shape, torch.zeros(shape.slot_bytes, dtype=torch.uint8))
            fill(slots[leaf(index, num_leaves)], step, index)
            formed(slots[leaf(index, num_leaves)], leaf(index, num_leaves), num_leaves)
        for left, right, parent in schedule(slots, num_leaves)[0]:
            slots[parent], spare = slots.pop(left), slots.pop(right)
            plus(slots[parent], spare)
            formed(slots[parent], parent, num_leaves)
        total = slots[root(num_leaves)]
        words = total.rows(0, shape.num_rows).view(torch.int64).view(shape.num_rows, -1).sum(dim=1)
        digest = sum(a * b for a, b in zip(words.tolist(), shape.multipliers.tolist(), strict=True)) % 2**64
        floats = [buffer for buffer in total.buffers if buffer.is_floating_point()]
        for view in [*total.gradients, *floats]:
            view /= float(total.scalars[0])
        _expected[key] = Outcome(digest, content(total))
    return _expected[key]


# -- members -----------------------------------------------------------------------------------------


class Member:
    """One process's part in a test: its page for life, and an exchange a generation."""

    def __init__(
        self, kind: str, seat: Seat, path: str, *, timeout_s: float = WAIT_S / 2, coding: Mode = Mode.AUTO
    ) -> None:
        self.kind = kind
        self.coding = coding
        self.seat = seat
        self.timeout_s = timeout_s
        self.path = path
        wire.CONNECT_S = timeout_s  # in this process; a machine on which all wait for their turn has no firewall
        self.page = WorkerPage()
        store = self.store("pages")
        store.set(str(seat.rank), self.page.address)
        self.pages = [store.get(str(rank)).decode() for rank in range(seat.size)]

    def store(self, name: str) -> dist.Store:
        return dist.FileStore(f"{self.path}/{name}", -1)

    def enter(self, generation: int, members: Sequence[int], kind: str = "") -> Exchange:
        """The exchange of these members; two-level: the lower half of all ranks is one host, the rest another."""
        kind, hosts = kind or self.kind, (range(len(members)),)
        if kind == "two-level":
            cut = sum(member < self.seat.size // 2 for member in members)
            hosts = tuple(ranks for ranks in (range(cut), range(cut, len(members))) if ranks)
        context = Context(
            generation=generation,
            rank=members.index(self.seat.rank),
            hosts=hosts,
            device=CPU,
            timeout_s=self.timeout_s,
            store=lambda name: self.store(f"{generation}-{name}"),
            page=self.page,
            pages=[self.pages[member] for member in members],
            coding=self.coding,
        )
        return BUILDERS[kind](context)


def hurry(exchange: Exchange, timeout_s: float) -> None:
    """Let no further wait of this member take longer. It has met the others at their leisure."""
    if isinstance(exchange, SharedMemory | TwoLevel):
        exchange.counters.timeout_s = timeout_s
    if isinstance(exchange, Network | TwoLevel) and exchange.wire is not None:
        exchange.wire._timeout_s = timeout_s
        exchange.wire._connected()._set_default_timeout(timedelta(seconds=timeout_s))


def resources() -> tuple[int, int]:
    return num_descriptors(), num_threads()


def settled(before: tuple[int, int], limit_s: float = WAIT_S / 4) -> tuple[int, int]:
    """What is open now; a process group's threads take a moment to end."""
    word, until = ctypes.c_uint32(), time.monotonic() + limit_s
    while any(now > then for now, then in zip(resources(), before, strict=True)) and time.monotonic() < until:
        gc.collect()  # what pytest.raises remembers
        release_abandoned()
        futex_wait(word, 0, 0.005)
    return resources()


def interrupt_when_told(exchange: Exchange, seat: Seat) -> None:
    """What the thread that listens to the head does when it hears of a new generation."""

    def listen() -> None:
        exchange.interrupt(AlarmError(str(seat.hear())))

    threading.Thread(target=listen, daemon=True).start()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results or errors, each from a thread of its own."""
    outcomes: list[Any] = [None] * len(calls)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = calls[rank]()
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def shared_memory(
    pages: Sequence[WorkerPage], rank: int, *, generation: int, timeout_s: float, names: Sequence[str] = ()
) -> SharedMemory:
    addresses = [page.address for page in pages]
    counters = Counters(pages[rank], addresses, rank, generation=generation, timeout_s=timeout_s, names=names)
    return SharedMemory(counters)


class Pair:
    """Two workers of one host, in two threads."""

    def __init__(self) -> None:
        self.pages = [WorkerPage(), WorkerPage()]
        self.entered: list[SharedMemory] = []
        self.members = [self.enter(rank, 1) for rank in range(2)]

    def enter(self, rank: int, generation: int) -> SharedMemory:
        exchange = shared_memory(self.pages, rank, generation=generation, timeout_s=WAIT_S)
        self.entered.append(exchange)
        return exchange

    def close(self) -> None:
        for exchange in self.entered:
            exchange.close()
        for page in self.pages:
            page.close()
        self.entered.clear()
        self.members.clear()
        self.pages.clear()

    def prepared(self, layout: FlatLayout) -> list[Share]:
        together(*(lambda member=member: member.prepare(layout) for member in self.members))
        return [share_of(member, 1, 2) for member in self.members]


@pytest.fixture(name="pair")
def make_pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()
