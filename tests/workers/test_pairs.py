"""Values between two workers of a group, through shared memory and over a wire: the same bits, and waits that end."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.waiting import WAIT_S
from tests.workers.exchanges import CPU, AlarmError, interrupt_when_told, resources, settled
from tests.workers.processes import KILLED, Seat, Team, num_descriptors, when_blocked_in
from unisono.core.errors import DeadlineExceeded, PeerLost
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.pages import MAX_MESSAGES
from unisono.engine.exchange.pairs import AHEAD, SWAP_BYTES, Pairs
from unisono.engine.exchange.shared_memory import futex_wait
from unisono.engine.state.packing import is_same_state, same_bits
from unisono.strategies.stages.link import FIRST_BYTES, Link

pytestmark = pytest.mark.more

ONE_HOST, TWO_HOSTS = (range(2),), (range(1), range(1, 2))
Hosts = tuple[range, ...]
everywhere = pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
BLOCKING = {"_watch", "_await"}


def linked(
    seat: Seat, path: str, hosts: Hosts, *, generation: int = 1, timeout_s: float = WAIT_S / 2
) -> tuple[Pairs, Link]:
    context = Context(
        generation=generation,
        rank=seat.rank,
        hosts=hosts,
        device=CPU,
        timeout_s=timeout_s,
        store=lambda name: dist.FileStore(f"{path}/{generation}-{name}", -1),
        names=[f"w{rank}" for rank in range(seat.size)],
    )
    pairs = context.open_pairs("group", range(seat.size), shares_memory=True)
    return pairs, Link(pairs, CPU)


def part(pairs: Pairs) -> None:
    """Close, when the other ones have mapped all that they read."""
    pairs.wire.all_gather_equal(b"x")
    pairs.close()


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(rank: int) -> list[Tensor]:
    """Of each size that is a case of its own, of several types, and one that is not contiguous."""
    piece = SWAP_BYTES // 4
    sizes = [0, 1, 4096, piece - 1, piece, piece + 1, 3 * piece + 5]
    return [
        *(numbers(size, seed=10 * rank + number) for number, size in enumerate(sizes)),
        numbers(7, 3, seed=rank, dtype=torch.bfloat16),
        numbers(300, 200, seed=rank).t(),
        torch.tensor(rank),
        torch.tensor([float("nan"), -0.0, rank]),
    ]


def values(rank: int) -> list[Any]:
    """The last ones have no tensor, and a header that is longer than the first message over a wire."""
    return [
        tensors(rank)[1:],
        ([numbers(5, 6, seed=rank), None], 0.5 + rank, torch.tensor(rank, dtype=torch.float64), {"count": (rank, 2)}),
        {"mask": numbers(33, seed=rank) > 0, "empty": torch.empty(0, 3), "z": numbers(4, seed=rank).to(torch.cfloat)},
        None,
        "x" * 3 * FIRST_BYTES,
    ]


def _pass_values(seat: Seat, path: str, hosts: Hosts) -> tuple[int, int]:
    warm_up = linked(seat, path, hosts, generation=1)
    warm_up[1].exchange(1 - seat.rank, torch.zeros(1))
    part(warm_up[0])
    del warm_up
    before = resources()
    pairs, link = linked(seat, path, hosts, generation=2)
    other = 1 - seat.rank
    for _ in range(3):
        for value in values(seat.rank):  # both send, and then both receive
            link.send(other, value)
        for value in values(other):
            assert is_same_state(link.receive(other), value)
        link.finish()
        for given, expected in zip(tensors(seat.rank), tensors(other), strict=True):
            kept = given.clone()
            found = link.exchange(other, given)
            assert same_bits(found, expected)
            assert same_bits(given, kept)
    part(pairs)
    del pairs, link
    now = settled(before)
    return now[0] - before[0], now[1] - before[1]


@everywhere
def test_what_arrives_has_the_bits_of_what_was_sent(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """And neither files, memory nor threads are left."""
    with Team(2, _pass_values, str(tmp_path), hosts) as team:
        for left in team.results():
            assert max(left) <= 0


def _exchange_in_backward(seat: Seat, path: str, hosts: Hosts) -> bool:
    pairs, link = linked(seat, path, hosts)
    other = 1 - seat.rank

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + link.exchange(other, x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
            return gradients[0] + link.exchange(other, gradients[0])

    x = numbers(100, seed=seat.rank).requires_grad_()
    total = Sum.apply(x)  # type: ignore[no-untyped-call]
    total.backward(torch.full((100,), 1.0 + seat.rank))
    expected = numbers(100, seed=seat.rank) + numbers(100, seed=other)
    part(pairs)
    assert x.grad is not None
    return same_bits(total.detach(), expected) and same_bits(x.grad, torch.full((100,), 3.0))


@everywhere
def test_tensors_are_exchanged_within_a_backward(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    with Team(2, _exchange_in_backward, str(tmp_path), hosts) as team:
        assert team.results() == [True, True]


def _of_three(seat: Seat, path: str) -> list[float]:
    pairs, link = linked(seat, path, (range(2), range(2, 3)))
    found = []
    for one, other in ((0, 1), (1, 2), (0, 2)):
        if seat.rank in (one, other):
            partner = one + other - seat.rank
            found.append(float(link.exchange(partner, torch.tensor([10.0 * seat.rank + partner]))))
            assert pairs.shares(partner) == ((one, other) == (0, 1))
    link.finish()
    part(pairs)
    return found


def test_a_group_may_be_on_several_hosts(tmp_path: pathlib.Path) -> None:
    """Of each two of its members, each takes the way that these two have."""
    with Team(3, _of_three, str(tmp_path)) as team:
        assert team.results() == [[10, 20], [1, 21], [12, 2]]


def _send_many(seat: Seat, path: str) -> int:
    pairs, link = linked(seat, path, ONE_HOST)
    if seat.rank:
        pairs.shares(0)
        assert seat.hear() == "read"
        for number in range(MAX_MESSAGES + 1):
            assert same_bits(link.receive(0)[0], torch.full((100,), float(number)))
        part(pairs)
        return 0
    sent = torch.empty(100)
    for number in range(MAX_MESSAGES):
        link.send(1, [sent.fill_(number)])
    watcher = when_blocked_in({"_watch"}, lambda: seat.say("waits"))
    link.send(1, [sent.fill_(MAX_MESSAGES)])
    link.finish()
    unread = MAX_MESSAGES + 1 - pairs._pairs[1].theirs.taken.value
    watcher.join()
    part(pairs)
    return unread


def test_who_is_not_read_waits_when_there_is_no_room(tmp_path: pathlib.Path) -> None:
    """What was sent may change at once; and few messages are unread when all have left."""
    with Team(2, _send_many, str(tmp_path)) as team:
        assert team.hear(0) == "waits"
        team.say(1, "read")
        unread, _ = team.results()
    assert unread <= AHEAD


def _send_often(seat: Seat, path: str) -> list[int]:
    pairs, link = linked(seat, path, ONE_HOST)
    other, opened = 1 - seat.rank, []
    for number in range(60):
        link.send(other, numbers(1000 + 10 * number, seed=number))
        assert same_bits(link.receive(other), numbers(1000 + 10 * number, seed=number))
        opened.append(num_descriptors())
    part(pairs)
    return opened


def test_memory_of_messages_is_used_again(tmp_path: pathlib.Path) -> None:
    with Team(2, _send_often, str(tmp_path)) as team:
        for opened in team.results():
            assert len(set(opened[10:])) == 1, opened


CALLS: dict[str, Callable[[Link, int], object]] = {
    "receive": lambda link, other: link.receive(other),
    "exchange": lambda link, other: link.exchange(other, torch.zeros(3 * SWAP_BYTES)),
}


def _lose_other(seat: Seat, path: str, hosts: Hosts, call: str, way: str) -> tuple[str, tuple[str, ...]]:
    pairs, link = linked(seat, path, hosts, timeout_s=0.5 if way == "late" else WAIT_S)
    if way != "late":
        link.exchange(1 - seat.rank, torch.zeros(4))
    else:  # both have met; only then it is late
        pairs.timeout_s = pairs.wire._timeout_s = WAIT_S
        link.exchange(1 - seat.rank, torch.zeros(4))
        pairs.timeout_s = pairs.wire._timeout_s = 0.5
    if seat.rank:
        seat.hear()
        pairs.close()
        seat.say("has left")
        seat.hear()
        return "", ()
    if way == "killed":  # its agent tells the head, and the head tells all; a wire may know it earlier
        interrupt_when_told(pairs, seat)  # type: ignore[arg-type]
    watcher = when_blocked_in(BLOCKING, lambda: seat.say("waits"))
    with pytest.raises((AlarmError, PeerLost, DeadlineExceeded)) as raised:
        CALLS[call](link, 1)
    watcher.join()
    with pytest.raises((AlarmError, PeerLost, DeadlineExceeded)):  # and from then on
        CALLS[call](link, 1)
    link.let_go()
    pairs.close()
    return type(raised.value).__name__, getattr(raised.value, "peers", ())


@everywhere
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", ["left", "late", "killed"])
def test_a_wait_ends_with_the_other_one(hosts: Hosts, call: str, way: str, tmp_path: pathlib.Path) -> None:
    with Team(2, _lose_other, str(tmp_path), hosts, call, way) as team:
        assert team.hear(0) == "waits"
        if way == "left":
            team.say(1, "leave")
            assert team.hear(1) == "has left"
        if way == "killed":
            team.kill(1)
            team.say(0, "a worker was lost")
        error, peers = team.result(0)
        if way == "killed":
            assert team.result(1) == KILLED
        team.say(1, "leave")
        team.say(1, "end")
    assert error in {"left": ["PeerLost"], "late": ["DeadlineExceeded"], "killed": ["AlarmError", "PeerLost"]}[way]
    if hosts == ONE_HOST and way != "killed":
        assert peers == ("w1",)


def _read_what_is_left(seat: Seat, path: str) -> bool:
    pairs, link = linked(seat, path, ONE_HOST)
    link.exchange(1 - seat.rank, torch.zeros(1))
    if seat.rank:
        link.send(0, numbers(5000, seed=1))
        seat.say("has sent")
        seat.hear()
        pairs.close()
        seat.say("has left")
        futex_wait(ctypes.c_uint32(), 0, WAIT_S)
    assert seat.hear() == "both have come"
    first = pairs.message(1)  # it is mapped before the other one closes it
    seat.say("reads")
    assert seat.hear() == "the other one has left"
    assert first.numel()
    found = same_bits(link.receive(1), numbers(5000, seed=1))
    with pytest.raises(PeerLost):
        link.receive(1)
    pairs.close()
    return found


def test_what_was_sent_before_a_leave_can_be_read(tmp_path: pathlib.Path) -> None:
    with Team(2, _read_what_is_left, str(tmp_path)) as team:
        assert team.hear(1) == "has sent"
        team.say(0, "both have come")
        assert team.hear(0) == "reads"
        team.say(1, "leave")
        assert team.hear(1) == "has left"
        team.say(0, "the other one has left")
        assert team.result(0)


def test_counters_may_pass_their_end(tmp_path: pathlib.Path) -> None:
    """32 bits last for long, not for ever."""
    with Team(2, _pass_the_end, str(tmp_path)) as team:
        assert team.results() == [None, None]


def _pass_the_end(seat: Seat, path: str) -> None:
    pairs, link = linked(seat, path, ONE_HOST)
    other = 1 - seat.rank
    link.exchange(other, torch.zeros(1))
    words = pairs._own.partners[other]
    link.exchange(other, torch.zeros(1))
    pairs.wire.all_gather_equal(b"x")  # both have seen that
    words.sent.value = words.taken.value = 2**32 - 3
    words.shown.value = 2**32 - 3
    pairs.wire.all_gather_equal(b"x")
    for number in range(8):
        link.send(other, [number, numbers(50, seed=number + seat.rank)])
        assert same_bits(link.receive(other)[1], numbers(50, seed=number + other))
        link.finish()
        assert same_bits(link.exchange(other, numbers(9, seed=seat.rank)), numbers(9, seed=other))
    part(pairs)
