"""Runs whose members are known from the start and stay: real exchanges between real processes, without a head.

So a test of what a step computes needs no server and no start of an interpreter, and many runs fit one after the other
into the same processes::

    def body(seat: Seat, place: Place) -> str:
        with place.run(seat, directory=None, seed=3) as run:
            ...

    results = train_on("shared", 3, body)      # by rank
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch._inductor  # what torch imports with the first optimizer: once, before the processes are made
import torch.distributed as dist

from tests.waiting import WAIT_S
from tests.workers.processes import Seat, Team
from unisono.cluster.worker.member import Member
from unisono.core.coding_rules import Mode
from unisono.engine.exchange import Exchange, wire
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.rounds import Report
from unisono.engine.rounds.connect import EXCHANGES
from unisono.engine.rounds.team import Part
from unisono.engine.rounds.team import Team as RunTeam
from unisono.script.run import Run
from unisono.system.accelerators import adds_on
from unisono.system.lifetime import scratch_folder

__all__ = ["AloneRun", "Place", "StaticRun", "train_on", "trained_alone"]

T = TypeVar("T")
Job = TypeVar("Job", bound=tuple[str, int])

Connect = Callable[[Part], Exchange]

CPU = torch.device("cpu")
TIMEOUT_S = WAIT_S / 2
"""Of one exchange: whoever waits says for whom before the test gives up."""


class StaticTeam(RunTeam):
    """The members of an exchange; nobody comes and nobody goes."""

    def __init__(self, exchange: Exchange, connect: Connect | None = None) -> None:
        self.exchange = exchange
        self._connect = connect
        self.rank, self.size = exchange.rank, exchange.size
        self.worker_ids = tuple(f"w{rank}" for rank in range(exchange.size))
        self.hosts = ("",) * exchange.size

    def new_page(self) -> WorkerPage:
        return WorkerPage()

    def connect(self, part: Part) -> Exchange:
        assert self._connect is not None, "this test has no groups"
        return self._connect(part)

    def join(self, phase: int, report: Report) -> list[Report]:
        return self.meet(report)


class StaticRun(Run):
    """A run with the members of ``exchange``."""

    def __init__(
        self,
        exchange: Exchange,
        directory: str | os.PathLike[str] | None = None,
        *,
        connect: Connect | None = None,
        **options: Any,
    ) -> None:
        self._exchange, self._connect = exchange, connect  # before the run begins
        super().__init__(directory, **{"device": "cpu", **options})

    def _make_team(self, member: Member | None, *, checks: bool) -> RunTeam:
        return StaticTeam(self._exchange, self._connect)


def AloneRun(directory: str | os.PathLike[str] | None = None, **options: Any) -> Run:  # noqa: N802 (stands for the class)
    """A run as ``python script.py`` makes it, on the CPU also where there is a GPU."""
    return Run(directory, device="cpu", **options)


class Place:
    """One process's access to the others: its shared memory for life, and a new exchange for every run.

    They meet in a file. A `dist.TCPStore` asks for the name of whoever connects: a name server that does not answer
    costs five seconds, and a process that is forked meanwhile finds the resolver locked for ever.
    """

    def __init__(self, seat: Seat, kind: str, path: str) -> None:
        torch.set_num_threads(1)
        wire.CONNECT_S = TIMEOUT_S  # in this process; a machine on which all wait for their turn has no firewall
        self._seat, self._kind = seat, kind
        self.device = CPU
        """Of all runs and exchanges."""
        self._store = dist.FileStore(path, -1)
        self._store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._page = WorkerPage()
        self._store.set(f"page-{seat.rank}", self._page.address)
        self._pages = [self._store.get(f"page-{rank}").decode() for rank in range(seat.size)]
        self._generations = itertools.count(1)

    def run(self, directory: str | os.PathLike[str] | None = None, **options: Any) -> Run:
        """The next run of all members. Only rank 0 has a directory, as only it writes."""
        directory = directory if self._seat.rank == 0 else None
        return StaticRun(self.exchange(), directory, connect=self.connect, device=self.device, **options)

    def exchange(self) -> Exchange:
        """The next generation. With "two-level" the members are split over two hosts."""
        self._generation = next(self._generations)
        every = tuple(range(self._seat.size))
        return self._build(Part("all", self._generation, every, self._page, tuple(self._pages)))

    def connect(self, part: Part) -> Exchange:
        """Some members of the current generation, on the same hosts."""
        return self._build(part)

    def _build(self, part: Part) -> Exchange:
        size, generation = len(part.ranks), self._generation
        hosts = (range(size),)
        if self._kind == "two-level":
            cut = sum(rank < self._seat.size // 2 for rank in part.ranks)
            hosts = tuple(ranks for ranks in (range(cut), range(cut, size)) if ranks)
        context = Context(
            generation=part.number,
            rank=part.ranks.index(self._seat.rank),
            hosts=hosts,
            device=adds_on(self.device),
            timeout_s=TIMEOUT_S,
            store=lambda name: dist.PrefixStore(f"{generation}/{part.name}/{name}", self._store),
            page=part.page,
            pages=part.pages,
            coding=Mode.NEVER,  # on a busy machine any link may look slow, and tests count bytes
        )
        return EXCHANGES[self._kind](context)

    def wait_for_all(self) -> None:
        """Block until every member is here: nobody ends while another still needs its memory or its connection."""
        self._store.add("here", 1)
        self._store.set(f"here-{self._seat.rank}", "")
        self._store.wait([f"here-{rank}" for rank in range(self._seat.size)], timedelta(seconds=TIMEOUT_S))


def train_on(kind: str, size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(seat, place, *arguments)`` returns in each of ``size`` processes, by rank."""
    with (
        scratch_folder("unisono-test-") as folder,
        Team(size, _in_place, kind, str(folder / "store"), body, arguments) as team,
    ):
        return team.results()


def trained_alone(
    jobs: Iterable[Job], train: Callable[[Path, Job, Callable[..., Run]], T], factory: pytest.TempPathFactory
) -> tuple[Path, dict[Job, T]]:
    """Return the folder in which ``train(folder, job, make_run)`` has trained each job, in one process with one thread,
    and what it has returned for each. One of the processes that run the tests of a module does that for all of them.
    """
    shared = factory.getbasetemp().parent if os.environ.get("PYTEST_XDIST_WORKER") else factory.getbasetemp()
    folder = shared / f"alone-{train.__module__}"
    folder.mkdir(exist_ok=True)
    found = folder / "outcomes"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            found.write_bytes(pickle.dumps({job: train(folder, job, AloneRun) for job in jobs}))
            torch.set_num_threads(before)
    return folder, pickle.loads(found.read_bytes())


def _in_place(seat: Seat, kind: str, path: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    place = Place(seat, kind, path)
    result = body(seat, place, *arguments)
    place.wait_for_all()
    return result
