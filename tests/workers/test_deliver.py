"""Tensors come from the members that have them to those that need them, and to nobody else."""

from __future__ import annotations

import pathlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.waiting import SILENCE_S, WAIT_S
from tests.workers.exchanges import (  # fixtures among them  # noqa: F401
    BLOCKING,
    BUILDERS,
    KINDS,
    TEAMS,
    AlarmError,
    Member,
    Pair,
    collected,
    every_kind,
    every_team,
    hurry,
    interrupt_when_told,
    layouts,
    make_pair,
    one_thread,
    resources,
    settled,
    shared_memory,
    together,
)
from tests.workers.processes import KILLED, Seat, Team, when_blocked_in
from tests.workers.static_team import Place, train_on
from unisono.core.errors import DeadlineExceeded, PeerLost
from unisono.engine.exchange import Exchange, Parcel, delivering
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.exchange.pages import GenerationFields, WorkerPage
from unisono.engine.exchange.staging import STAGE_BYTES
from unisono.engine.rounds.members import Summed
from unisono.engine.rounds.transfer import send_state
from unisono.engine.state.packing import pack
from unisono.strategies.delay.delayed import Committed, give

pytestmark = pytest.mark.more

LARGE = STAGE_BYTES // 8 * 3 + 1
"""float64 numbers that do not fit the memory of a turn, nor that of two."""


def numbers(parcel: int) -> Tensor:
    return torch.arange(24, dtype=torch.float32) + 100 * parcel


def content(parcel: int) -> Tensor:
    """What the source of a parcel has: any dtype and stride, also none."""
    plain = numbers(parcel)
    kinds: list[Callable[[], Tensor]] = [
        lambda: plain.view(4, 6),
        lambda: plain.view(4, 6).t(),
        lambda: plain.view(1, 4, 2, 3).to(memory_format=torch.channels_last),
        lambda: plain[3],
        lambda: plain[::5],
        lambda: plain[:0],
        lambda: plain.to(torch.bfloat16),
        lambda: plain.to(torch.float64),
        lambda: plain.to(torch.int64)[7],
        lambda: plain % (parcel + 2) == 0,
        lambda: torch.tensor(parcel % 2 == 0),
        lambda: torch.complex(plain, -plain),
        lambda: torch.nn.Parameter(plain.clone()),
        lambda: torch.full((LARGE,), parcel + 0.5, dtype=torch.float64),
        lambda: torch.full((9, 30_001), parcel, dtype=torch.int32).t(),
    ]
    return kinds[parcel % len(kinds)]()


Pattern = list[tuple[int, tuple[int, ...]]]


def everyone_to_everyone(size: int) -> Pattern:
    return [(source, tuple(r for r in range(size) if r != source)) for source in range(size) for _ in range(size)]


def some_to_some(size: int) -> Pattern:
    """One target, all but one, none; sources in any order, some with nothing."""
    pattern: Pattern = []
    for index in range(30):
        source = (5 * index + index // 7) % size
        targets = tuple(rank for rank in range(size) if rank != source and (index >> (rank % 4)) % 2)
        pattern.append((source, targets))
    return pattern


def one_to_all(size: int) -> Pattern:
    return [(size - 1, tuple(range(size - 1)))] * 15


def much_to_everyone(size: int) -> Pattern:
    """Several turns, in all of which everyone has something for everyone."""
    return [(source, tuple(r for r in range(size) if r != source)) for source in range(size) for _ in range(15)]


PATTERNS = [everyone_to_everyone, some_to_some, one_to_all, lambda size: [], lambda size: [(0, ())]]


def parcels_of(pattern: Pattern, rank: int) -> tuple[list[Parcel], list[Tensor]]:
    """What one member gives to the delivery, and what has to be in its tensors afterwards."""
    parcels, right = [], []
    for index, (source, targets) in enumerate(pattern):
        whole = content(index)
        if rank == source:
            tensor = content(index)
        elif rank in targets:
            tensor = content(index).detach()
            tensor.fill_(1)
        else:
            tensor = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        parcels.append(Parcel(source, targets, tensor))
        right.append(whole if tensor.device.type != "meta" else tensor)
    return parcels, right


def check(parcels: list[Parcel], right: list[Tensor]) -> None:
    for parcel, whole in zip(parcels, right, strict=True):
        if whole.device.type != "meta":
            assert torch.equal(parcel.tensor, whole)
            assert parcel.tensor.stride() == whole.stride()


def _deliver_all(seat: Seat, kind: str, path: str) -> list[int]:
    member = Member(kind, seat, path)
    warm_up = member.enter(1, range(seat.size))
    warm_up.all_gather(b"")
    warm_up.close()
    before = resources()
    exchange = member.enter(2, range(seat.size))
    for turn in range(2):
        for pattern in PATTERNS:
            parcels, right = parcels_of(pattern(seat.size), seat.rank)
            sent = exchange.deliver(parcels)
            assert sent >= 0
            check(parcels, right)
        exchange.all_gather(b"%d" % turn)
    exchange.close()
    member.page.close()
    del exchange, parcels
    return [now - then for now, then in zip(settled(before), before, strict=True)]


def test_every_exchange_is_held_to_this() -> None:
    assert {kind for kind, _ in KINDS} == {*BUILDERS}


@every_kind
def test_parcels_arrive_as_they_were_sent(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """Any pattern, dtype, stride and size; what was opened is closed."""
    with Team(size, _deliver_all, kind, str(tmp_path)) as team:
        for left in team.results():
            assert left[0] <= 0, "file descriptors"
            assert left[1] <= 0, "threads"


# -- waits that end, and memory that nobody writes meanwhile -----------------------------------------


def absent_last(size: int) -> Pattern:
    """Parcels of more than two turns that need the last member, from it and to it."""
    large = 13
    return [(0, (size - 1,))] * large + [(size - 1, tuple(range(size - 1)))] * large + everyone_to_everyone(size)


def _interrupted(seat: Seat, kind: str, path: str) -> None:
    exchange = Member(kind, seat, path, timeout_s=10 * WAIT_S).enter(1, range(seat.size))
    exchange.all_gather(b"")
    if seat.rank == seat.size - 1:
        assert seat.hear() == "all were interrupted"  # and meanwhile takes no part
        exchange.close()
        return
    parcels, _ = parcels_of(absent_last(seat.size), seat.rank)
    if seat.rank:
        interrupt_when_told(exchange, seat)
        with pytest.raises((AlarmError, PeerLost)):  # the first that leaves may tell it
            exchange.deliver(parcels)
        exchange.close()
        return
    alarm = AlarmError("a new generation")
    watcher = when_blocked_in(BLOCKING, lambda: exchange.interrupt(alarm))
    with pytest.raises(AlarmError) as raised:
        exchange.deliver(parcels)
    assert raised.value is alarm
    with pytest.raises(AlarmError):  # before it says anything to anybody
        exchange.deliver(parcels)
    watcher.join()
    exchange.close()


@every_team
def test_interrupt_ends_a_delivery(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    with Team(size, _interrupted, kind, str(tmp_path)) as team:
        team.result(0)
        for rank in range(1, size - 1):
            team.say(rank, "you too")
            team.result(rank)
        team.say(size - 1, "all were interrupted")
        assert team.results() == [None] * size


POINTS = ["before", "deliver.staged", "deliver.sent", "deliver.received"]
PASSED_BY = {"shared": ("deliver.sent", "deliver.received"), "gloo": ("deliver.staged",)}


def _stop_at(point: str, seat: Seat, exchange: Exchange, parcels: list[Parcel]) -> None:
    """Take part in a delivery until the second time that it comes to a point, say so, and stop there for ever."""
    seen = []

    def stop(name: str) -> None:
        seen.append(name)
        if seen.count(point) == 2:
            seat.say(point)
            seat.hear()

    if point != "before":
        delivering.point = stop  # type: ignore[assignment,attr-defined]
        exchange.deliver(parcels)
    seat.say(point)
    seat.hear()


def _survive(seat: Seat, kind: str, path: str, point: str, victim: int) -> list[int]:
    member = Member(kind, seat, path)
    before = resources()
    exchange = member.enter(1, range(seat.size))
    parcels, right = parcels_of(some_to_some(seat.size), seat.rank)
    exchange.deliver(parcels)
    check(parcels, right)
    exchange.all_gather(b"")
    if kind == "gloo":  # a survivor may have all of the victim's, and then waits for another survivor
        hurry(exchange, 4 * SILENCE_S)
    parcels, _ = parcels_of(much_to_everyone(seat.size), seat.rank)
    if seat.rank == victim:
        _stop_at(point, seat, exchange, parcels)
    if kind != "gloo":
        interrupt_when_told(exchange, seat)
    with pytest.raises((AlarmError, PeerLost, DeadlineExceeded)):
        exchange.deliver(parcels)
    exchange.close()
    own = [index for index, each in enumerate(parcels) if each.source == seat.rank]
    check([parcels[index] for index in own], [content(index) for index in own])
    received = [each.tensor.detach() for each in parcels if seat.rank in each.targets]
    for tensor in received:  # from now on nobody writes there
        tensor.fill_(0)

    survivors = [rank for rank in range(seat.size) if rank != victim]
    exchange = member.enter(3, survivors)
    for pattern in (everyone_to_everyone, some_to_some):
        parcels, right = parcels_of(pattern(len(survivors)), exchange.rank)
        exchange.deliver(parcels)
        check(parcels, right)
    exchange.all_gather(b"")
    exchange.close()
    member.page.close()
    assert not any(tensor.any() for tensor in received)
    del exchange, parcels
    return [now - then for now, then in zip(settled(before), before, strict=True)]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("kind", "size", "point"),
    [(kind, size, point) for kind, size in TEAMS for point in POINTS if point not in PASSED_BY.get(kind, ())],
)
def test_survivors_of_a_kill_deliver_again(
    kind: str, size: int, victim: int, point: str, tmp_path: pathlib.Path
) -> None:
    """SIGKILL inside of a delivery: the others' waits end, what they have sent is unharmed, and then all arrives."""
    with Team(size, _survive, kind, str(tmp_path), point, victim) as team:
        assert team.hear(victim) == point
        team.kill(victim)
        if kind != "gloo":
            for rank in set(range(size)) - {victim}:
                team.say(rank, "a member was killed")
        results = team.results()
    assert results[victim] == KILLED
    for left in (result for result in results if result != KILLED):
        if kind != "two-level":  # its lanes are abandoned with operations that end at their timeout
            assert left[0] <= 0, "file descriptors"
            assert left[1] <= 1, "threads"  # one may still listen for the interrupt


# -- the subtle ones, in one process -----------------------------------------------------------------


def large_parcels(rank: int, number: float) -> list[Parcel]:
    """From member 0 to member 1, of five turns."""
    tensor = torch.full((STAGE_BYTES,), number if rank == 0 else 0.0)
    return [Parcel(0, (1,), tensor), Parcel(0, (1,), tensor[:0])]


def test_nobody_writes_what_another_member_still_reads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stops when it could read the first turn, until the writer has nowhere to write any more."""
    reading, blocked = threading.Event(), threading.Event()
    reader: list[int] = []

    def stop(name: str) -> None:
        if threading.get_ident() in reader and not reading.is_set():
            reading.set()
            assert blocked.wait(WAIT_S)

    monkeypatch.setattr(delivering, "point", stop)
    parcels = [large_parcels(0, 3.0), large_parcels(1, 3.0)]
    for turn in range(4):  # all values are different
        parcels[0][0].tensor[turn * (STAGE_BYTES // 4) :] = float(turn)

    def write() -> None:
        when_blocked_in({"_watch"}, blocked.set)
        pair.members[0].deliver(parcels[0])
        blocked.set()

    def read() -> None:
        reader.append(threading.get_ident())
        pair.members[1].deliver(parcels[1])

    assert together(write, read) == [None, None]
    assert torch.equal(parcels[1][0].tensor, parcels[0][0].tensor)


def test_a_writer_does_not_wait_for_those_that_read_nothing() -> None:
    """Member 2 takes no part yet, and the others are done."""
    pages = [WorkerPage() for _ in range(3)]
    members = [shared_memory(pages, rank, generation=1, timeout_s=WAIT_S) for rank in range(3)]
    parcels = [large_parcels(rank, 2.0) for rank in range(3)]
    met = together(*(lambda m=m: m.all_gather(b"") for m in members))
    assert met == [[b""] * 3] * 3
    assert together(*(lambda r=r: members[r].deliver(parcels[r]) for r in range(2))) == [0, 0]
    assert torch.equal(parcels[1][0].tensor, parcels[0][0].tensor)
    members[2].deliver(parcels[2])
    assert together(*(lambda m=m: m.all_gather(b"") for m in members)) == [[b""] * 3] * 3
    for member in members:
        member.close()
    for page in pages:
        page.close()


def test_the_counters_of_a_delivery_may_pass_their_end(pair: Pair) -> None:
    for member in pair.members:
        own = member.counters.own
        own.counters["staged"].value = own.counters["copied"].value = 2**32 - 3
    for number in range(1, 4):
        parcels = [large_parcels(rank, float(number)) for rank in range(2)]
        assert together(*(lambda r=r, p=p: pair.members[r].deliver(p) for r, p in enumerate(parcels))) == [0, 0]
        assert parcels[1][0].tensor.eq(number).all()


def test_leaves_that_members_take_from_each_other_do_not_count_in_a_delivery(pair: Pair) -> None:
    """What lies on one page has different places: each name is there once."""
    names = [field[0] for field in GenerationFields._fields_]
    assert len(set(names)) == len(names)
    together(*(lambda member=member: member.all_gather(b"") for member in pair.members))
    idle, late = (member.helping for member in pair.members)
    idle.show_work([])
    late.show_work([30, 40, 50])
    assert [idle.take([1.0, 1.0], elapsed_s=9.0) for _ in range(3)] == [50, 40, None]
    parcels = [large_parcels(rank, 1.0) for rank in range(2)]
    assert together(*(lambda r=r: pair.members[r].deliver(parcels[r]) for r in range(2))) == [0, 0]
    assert {name: counter.value for name, counter in pair.members[0].counters.own.counters.items()} == {
        name: 4 if name in {"staged", "copied"} else int(name in {"posted", "read"})
        for name in pair.members[0].counters.own.counters
    }


def test_a_member_that_leaves_ends_the_deliveries_of_the_others(pair: Pair) -> None:
    """Also of one that waits for it to read."""
    blocked = threading.Event()

    def write() -> None:
        when_blocked_in({"_watch"}, blocked.set)
        pair.members[0].deliver(large_parcels(0, 1.0))

    def leave() -> None:
        assert blocked.wait(WAIT_S)
        pair.members[1].interrupt(AlarmError())
        pair.members[1].deliver(large_parcels(1, 1.0))

    assert [type(outcome) for outcome in together(write, leave)] == [PeerLost, AlarmError]


def test_a_delivery_keeps_no_more_memory_than_two_halves(pair: Pair) -> None:
    for _ in range(3):
        assert together(*(lambda r=r: pair.members[r].deliver(large_parcels(r, 1.0)) for r in range(2))) == [0, 0]
    mapped = [sum(each.numel() for each in page.mapped.values()) for page in pair.members[1].counters.pages]
    assert mapped == [2 * STAGE_BYTES, 0]


# -- how much crosses --------------------------------------------------------------------------------


def _sent(seat: Seat, kind: str, path: str) -> int:
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    everyone = tuple(range(1, seat.size))
    parcels = [Parcel(0, everyone, torch.full((LARGE,), seat.rank, dtype=torch.float64))]
    sent = exchange.deliver(parcels)
    assert parcels[0].tensor.eq(0).all()
    exchange.all_gather(b"")
    exchange.close()
    return sent


@pytest.mark.parametrize(("kind", "size", "hosts"), [("shared", 3, 1), ("gloo", 3, 3), ("two-level", 4, 2)])
def test_a_tensor_is_sent_once_to_each_host_that_needs_it(
    kind: str, size: int, hosts: int, tmp_path: pathlib.Path
) -> None:
    with Team(size, _sent, kind, str(tmp_path)) as team:
        sent = team.results()
    assert sum(sent) == 8 * LARGE * (hosts - 1)
    if kind == "two-level":
        assert sent[0] == pytest.approx(sent[1], rel=0.05)


def _give(seat: Seat, place: Place) -> tuple[int, float | None]:
    """Returns how many slots this member has made for the result, and what it has got."""
    exchange, layout = place.exchange(), layouts()[0]
    made: list[Slot] = []

    def new_slot(layout: FlatLayout) -> Slot:
        made.append(Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8)))
        return made[-1]

    result = Slot(layout, torch.full((layout.slot_bytes,), 7, dtype=torch.uint8))
    finished = Committed(layout, Summed(result, 42, {}))
    members: Any = SimpleNamespace(rank=seat.rank, exchange=exchange, slots=SimpleNamespace(layout=layout))
    summed = give(members, 0, [2], finished, new_slot)
    exchange.all_gather(b"")  # others may still read this one's memory
    return len(made), None if summed is None else float(summed.slot.rows(0, layout.num_rows).float().mean())


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_committed_sum_goes_to_the_members_that_lack_it_and_the_others_make_no_room_for_it(kind: str) -> None:
    assert train_on(kind, 3, _give) == [(0, None), (0, None), (1, 7.0)]


STATE_BYTES = 64 << 20


def _take_part(seat: Seat, place: Place) -> tuple[int, bool]:
    """Returns by how much the memory of this process has grown at most, and whether it got the state."""
    exchange = place.exchange()
    state = {"weights": [torch.full((STATE_BYTES // 4 // 8,), float(n)) for n in range(8)], "one": torch.tensor(1.0)}
    packed = pack(state, "state") if seat.rank == 0 else None
    del state
    exchange.all_gather(b"")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    got = send_state(exchange, 0, [2], packed)
    grown = _peak() - before
    exchange.all_gather(b"")  # others may still read this one's memory
    is_whole = got is not None and [float(one.sum()) / len(one) for one in got["weights"]] == [*range(8)]
    return grown, is_whole


def _peak() -> int:
    (line,) = (each for each in pathlib.Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel counts the pages of a process")
@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_state_that_another_member_gets_costs_a_member_no_memory(kind: str) -> None:
    (_, first), (grown, second), (_, third) = train_on(kind, 3, _take_part)
    assert (first, second, third) == (False, False, True)
    assert grown < STATE_BYTES // 2
