"""Runs whose members are known from the start and stay: real exchanges between real processes, without a head.

So a test of what a step computes needs no server and no start of an interpreter, and many runs fit one after the other
into the same processes::

    def body(seat: Seat, place: Place) -> str:
        with place.run(seat, directory=None, seed=3) as run:
            ...

    results = train_on("shared", 3, body)      # by rank
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch._inductor  # what torch imports with the first optimizer: once, before the processes are made
import torch.distributed as dist

from tests.waiting import WAIT_S
from tests.workers.processes import Seat, Team
from unisono.exchange import Exchange, wire
from unisono.exchange.context import Context
from unisono.exchange.pages import WorkerPage
from unisono.member import Member
from unisono.rounds.connect import EXCHANGES
from unisono.rounds.standing import Report
from unisono.rounds.team import AloneTeam
from unisono.rounds.team import Team as RunTeam
from unisono.training.run import Run

__all__ = ["AloneRun", "Place", "StaticRun", "train_on", "trained_alone"]

T = TypeVar("T")
Job = TypeVar("Job", bound=tuple[str, int])

CPU = torch.device("cpu")
TIMEOUT_S = WAIT_S / 2
"""Of one exchange: whoever waits says for whom before the test gives up."""


class StaticTeam(AloneTeam):
    """The members of an exchange; nobody comes and nobody goes."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size
        self.worker_ids = tuple(f"w{rank}" for rank in range(exchange.size))
        self.hosts = ("",) * exchange.size

    def join(self, phase: int, report: Report) -> list[Report]:
        return self.meet(report)

    def meet(self, report: Report) -> list[Report]:
        letters = self.exchange.all_gather(msgspec.msgpack.encode(report))
        return [msgspec.msgpack.decode(letter, type=Report) for letter in letters]


class StaticRun(Run):
    """A run with the members of ``exchange``."""

    def __init__(self, exchange: Exchange, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._exchange = exchange  # before the run begins
        super().__init__(directory, device="cpu", **options)

    def _make_team(self, member: Member | None) -> RunTeam:
        return StaticTeam(self._exchange)


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
        self._store = dist.FileStore(path, -1)
        self._store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._page = WorkerPage()
        self._store.set(f"page-{seat.rank}", self._page.address)
        self._pages = [self._store.get(f"page-{rank}").decode() for rank in range(seat.size)]
        self._generations = itertools.count(1)

    def run(self, directory: str | os.PathLike[str] | None = None, **options: Any) -> Run:
        """The next run of all members. Only rank 0 has a directory, as only it writes."""
        return StaticRun(self.exchange(), directory if self._seat.rank == 0 else None, **options)

    def exchange(self) -> Exchange:
        """The next generation. With "two-level" the members are split over two hosts."""
        size, generation = self._seat.size, next(self._generations)
        hosts = (range(size // 2), range(size // 2, size)) if self._kind == "two-level" else (range(size),)
        context = Context(
            generation=generation,
            rank=self._seat.rank,
            hosts=hosts,
            device=CPU,
            timeout_s=TIMEOUT_S,
            store=lambda name: dist.PrefixStore(f"{generation}/{name}", self._store),
            page=self._page,
            pages=self._pages,
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
        tempfile.NamedTemporaryFile(prefix="unisono-test-") as file,
        Team(size, _in_place, kind, file.name, body, arguments) as team,
    ):
        return team.results()


@contextlib.contextmanager
def trained_alone(jobs: Iterable[Job], train: Callable[[Job, Callable[..., Run]], T]) -> Iterator[dict[Job, T]]:
    """What ``train(job, make_run)`` returns for each job in this one process, with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {job: train(job, AloneRun) for job in jobs}
    torch.set_num_threads(before)


def _in_place(seat: Seat, kind: str, path: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    place = Place(seat, kind, path)
    result = body(seat, place, *arguments)
    place.wait_for_all()
    return result
