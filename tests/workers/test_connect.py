"""Which kind of exchange the members of a generation get."""

from __future__ import annotations

import gc

import click
import pytest
import torch

from unisono.cli.run import run
from unisono.cluster.worker.member import Member
from unisono.core.errors import DeadlineExceeded, UsageError
from unisono.core.messages import MemberInfo, Notice
from unisono.core.spec import WorkerSpec
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.rounds.connect import AUTO, EXCHANGES, build_exchange, choose_kind, hosts_of


def notice(*places: tuple[str, str]) -> Notice:
    """Of members on these (host, device)."""
    members = [
        MemberInfo(worker_id=f"w{n}", host=host, pid=n, device=device, page="/page" if device == "cpu" else "")
        for n, (host, device) in enumerate(places)
    ]
    return Notice(generation=1, members=members, immediate=False, reason="")


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE_HOST = notice(("a", "cpu"), ("a", "cpu"))
TWO_HOSTS = notice(("a", "cpu"), ("b", "cpu"))
UNEVEN = notice(("a", "cpu"), ("a", "cpu"), ("b", "cpu"))
ONE_GPU = notice(("a", "cuda:0"), ("a", "cuda:0"))
GPUS = notice(("a", "cuda:0"), ("a", "cuda:1"), ("b", "cuda:0"))


def test_members_of_a_host_stand_together() -> None:
    assert hosts_of(UNEVEN) == [range(2), range(2, 3)]


@pytest.mark.parametrize(
    ("members", "device", "kind"),
    [
        (ONE_HOST, CPU, "shared"),
        (TWO_HOSTS, CPU, "gloo"),
        (UNEVEN, CPU, "two-level"),
        (GPUS, GPU, "gloo"),
        (notice(("a", "cuda:0")), GPU, "gloo"),
        (ONE_GPU, GPU, "gloo"),
        (notice(("a", "cuda:0"), ("a", "cpu")), CPU, "gloo"),  # it sees on what the others compute
    ],
)
def test_the_fastest_kind_is_chosen(members: Notice, device: torch.device, kind: str) -> None:
    assert choose_kind(members, "auto", device) == kind


@pytest.mark.parametrize(
    ("members", "device", "wanted", "told"),
    [
        (GPUS, GPU, "shared", "--exchange shared needs workers on CPUs; these are on cuda"),
        (TWO_HOSTS, CPU, "shared", "needs all workers on one host, these are on 2"),
        (ONE_HOST, CPU, "mpi", "the exchange 'mpi' is unknown; choose one of auto, shared"),
    ],
)
def test_what_cannot_be_connected_is_refused(members: Notice, device: torch.device, wanted: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        choose_kind(members, wanted, device)


def test_the_command_names_every_exchange() -> None:
    option = next(each for each in run.params if each.name == "exchange")
    assert isinstance(option, click.Option)
    assert [name for name in (AUTO, *EXCHANGES) if name not in str(option.help)] == []


def test_a_row_of_the_table_is_all_that_a_new_exchange_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built from what the notice says of the members."""
    found: list[Context] = []

    def build(context: Context) -> Exchange:
        found.append(context)
        return Alone(context.device)

    monkeypatch.setitem(EXCHANGES, "mine", build)
    member = Member(WorkerSpec(head="ws://nowhere:1", token="", worker_id="w1", host="a"), UNEVEN.members[1], {})
    built = build_exchange(UNEVEN, 1, member=member, device=CPU, wanted="mine", timeout_s=7.0)
    assert isinstance(built, Alone)
    (context,) = found
    assert (context.generation, context.rank, context.hosts) == (1, 1, (range(2), range(2, 3)))
    assert list(context.names) == ["w0", "w1", "w2"]
    assert context.timeout_s == 7.0


@pytest.mark.parametrize(("hosts", "wanted"), [("bb", "shared"), ("abb", "two-level")])
def test_an_exchange_knows_its_members_by_their_workers_names(hosts: str, wanted: str) -> None:
    """The error names the worker that does not come, for the head that decides whom to go on without."""
    pages = [WorkerPage() for _ in hosts]
    members = [
        MemberInfo(worker_id=f"w{n + 4}", host=host, pid=n, device="cpu", page=page.address)
        for n, (host, page) in enumerate(zip(hosts, pages, strict=True))
    ]
    there = Notice(generation=1, members=members, immediate=False, reason="")
    rank = hosts.index("b")
    spec = WorkerSpec(head="ws://nowhere:1", worker_id=members[rank].worker_id, host="b")
    member = Member(spec, members[rank], {}, pages[rank])
    exchange = build_exchange(there, rank, member=member, device=CPU, wanted=wanted, timeout_s=0.05)
    absent = members[rank + 1].worker_id
    try:
        exchange.all_gather(b"")
    except DeadlineExceeded as error:
        told, peers = str(error), error.peers
    exchange.close()
    for page in pages:
        page.close()
    member.page = None  # a thread that looks for the other hosts holds the member for a moment
    del exchange, member, page, pages
    gc.collect()  # pages and members that did not connect refer to themselves, and hold their memory
    assert peers == (absent,)
    assert f"waited 0 s for worker {absent} in generation 1" in told
