"""What every exchange promises: the bits of the tree, waits that end, nodes that survive, nothing left behind."""

from __future__ import annotations

import gc
import pathlib
import resource
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch.distributed as dist

from tests.waiting import SILENCE_S, WAIT_S
from tests.workers.exchanges import (  # fixtures among them  # noqa: F401
    BLOCKING,
    BUILDERS,
    CPU,
    KINDS,
    STEPS,
    TEAMS,
    AlarmError,
    Member,
    Outcome,
    Pair,
    collected,
    compute,
    content,
    every_kind,
    every_team,
    expected,
    hurry,
    interrupt_when_told,
    layouts,
    make_pair,
    one_thread,
    resources,
    settled,
    share_of,
    shared_memory,
    telemetry_of,
    together,
)
from tests.workers.processes import (
    KILLED,
    Seat,
    Team,
    num_descriptors,
    when_blocked_in,
)
from unisono.core.errors import DeadlineExceeded, PeerLost, RecipeError, UsageError
from unisono.core.plan import replan
from unisono.core.tree import Node
from unisono.engine.exchange import Exchange, Share, combine, two_level
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.host import SharedMemory
from unisono.engine.exchange.pages import MAX_NODES, MAX_TEAM, GenerationFields, WorkerPage
from unisono.engine.exchange.shared_memory import Segment
from unisono.engine.exchange.two_level import TwoLevel
from unisono.engine.exchange.wire import Wire
from unisono.engine.rounds.connect import EXCHANGES

pytestmark = pytest.mark.more

# -- the same bits -----------------------------------------------------------------------------------


def _all_steps(seat: Seat, kind: str, path: str) -> dict[str, Any]:
    member, made = Member(kind, seat, path), layouts()
    warm_up = member.enter(1, range(seat.size))
    warm_up.all_gather(b"")
    warm_up.close()
    before = resources()
    exchange = member.enter(2, range(seat.size))
    assert (exchange.rank, exchange.size) == (seat.rank, seat.size)
    steps, prepared = [], -1
    for step, (layout, num_leaves) in enumerate(STEPS):
        if layout != prepared:
            exchange.prepare(made[layout])
            prepared = layout
        share = share_of(exchange, step, num_leaves)
        if step % 2 and seat.rank % 2:
            exchange.offer(share, made[layout].tail_row // 2)
        combined = combine(exchange, share, telemetry_of(seat.rank, step))
        assert list(combined.telemetry) == [telemetry_of(rank, step) for rank in range(seat.size)]
        steps.append(Outcome.of(combined))
        exchange.release(combined.slot)
    exchange.all_gather(b"")
    exchange.close()  # at once: nobody may need anything of it any more
    member.page.close()
    del exchange, combined, share
    return {"steps": steps, "left": [now - then for now, then in zip(settled(before), before, strict=True)]}


def test_every_exchange_of_the_table_is_held_to_this() -> None:
    assert {kind for kind, _ in KINDS} == {*BUILDERS}
    assert {kind for kind, _ in TEAMS} == {*EXCHANGES}


@every_kind
def test_every_step_gives_the_bits_of_the_tree(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """Whatever the exchange, members, leaves and layout; and what was opened is closed."""
    with Team(size, _all_steps, kind, str(tmp_path)) as team:
        results = team.results()
    for result in results:
        for step, (layout, num_leaves) in enumerate(STEPS):
            assert result["steps"][step] == expected(layout, step, num_leaves), f"step {step}"
        # The page and all that hung on it are gone too.
        assert result["left"][0] <= 0, "file descriptors"
        assert result["left"][1] <= 0, "threads"


PAYLOADS = [0, 1, 100, 5000, 0, 300_000, 17]


def payload(rank: int, size: int) -> bytes:
    return bytes([rank + 1]) * (size * (rank + 1) // 2)


def _payloads(seat: Seat, kind: str, path: str) -> None:
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    for length in PAYLOADS:
        assert exchange.all_gather(payload(seat.rank, length)) == [payload(r, length) for r in range(seat.size)]
    exchange.close()


@every_kind
def test_payloads_of_any_length_arrive_as_they_were_sent(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    with Team(size, _payloads, kind, str(tmp_path)) as team:
        assert team.results() == [None] * size


# -- waits that end ----------------------------------------------------------------------------------


def _interrupted(seat: Seat, kind: str, path: str, operation: str) -> None:
    exchange = Member(kind, seat, path, timeout_s=10 * WAIT_S).enter(1, range(seat.size))
    if operation != "first":
        exchange.prepare(layouts()[1])
    if seat.rank == seat.size - 1:
        assert seat.hear() == "all were interrupted"  # and meanwhile takes no part
        exchange.close()
        return
    call: Callable[[], object] = {
        "first": lambda: exchange.all_gather(b"hello"),
        "all_gather": lambda: exchange.all_gather(b"hello"),
        "prepare": lambda: (exchange.prepare(layouts()[0]), exchange.all_gather(b"")),
        "combine": lambda: combine(exchange, share_of(exchange, 0, 8), telemetry_of(seat.rank, 0)),
    }[operation]
    if seat.rank:
        interrupt_when_told(exchange, seat)
        with pytest.raises((AlarmError, PeerLost)):  # the first that leaves may tell it
            call()
        exchange.close()
        return
    alarm = AlarmError("a new generation")
    watcher = when_blocked_in(BLOCKING, lambda: exchange.interrupt(alarm))
    with pytest.raises(AlarmError) as raised:
        call()
    assert raised.value is alarm
    with pytest.raises(AlarmError):  # and every later one, before it says anything to anybody
        exchange.all_gather(b"")
    watcher.join()
    exchange.close()


@every_team
@pytest.mark.parametrize("operation", ["first", "all_gather", "prepare", "combine"])
def test_interrupt_ends_a_blocked_wait(kind: str, size: int, operation: str, tmp_path: pathlib.Path) -> None:
    """From another thread, with the error that it was given, and not at its deadline."""
    with Team(size, _interrupted, kind, str(tmp_path), operation) as team:
        team.result(0)
        for rank in range(1, size - 1):
            team.say(rank, "you too")
            team.result(rank)
        team.say(size - 1, "all were interrupted")
        assert team.results() == [None] * size


def _late(seat: Seat, kind: str, path: str) -> str:
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    exchange.all_gather(b"")
    hurry(exchange, 0.5)
    if seat.rank == 0:
        return str(seat.hear())
    with pytest.raises((DeadlineExceeded, PeerLost)) as raised:
        exchange.all_gather(b"")
    exchange.close()
    return type(raised.value).__name__


@every_team
def test_a_wait_ends_at_its_deadline(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """When a member does not come to it; the others may learn it from the first that gives up."""
    with Team(size, _late, kind, str(tmp_path)) as team:
        for rank in range(1, size):
            team.result(rank)
        team.say(0, "absent")
        absent, *present = team.results()
    assert absent == "absent"
    assert "DeadlineExceeded" in present


# -- a member dies -----------------------------------------------------------------------------------

NUM_LEAVES = 9
POINTS = ["before combine", "published", "summed"]


def advance(point: str, exchange: Exchange, share: Share) -> None:
    """Take part in a combine until a point inside of it."""
    if point != "before combine":
        current = exchange.begin(share)
        current.publish()
        if point == "summed":
            current.reduce()


def _stop_at(point: str, seat: Seat, exchange: Exchange, share: Share) -> None:
    """Take part in a combine until a point inside of it, say so, and stop there for ever."""
    advance(point, exchange, share)
    seat.say(point)
    seat.hear()


def _survive(seat: Seat, kind: str, path: str, point: str, victim: int, later_kind: str) -> dict[str, Any]:
    member, layout = Member(kind, seat, path), layouts()[0]
    before = resources()
    exchange = member.enter(1, range(seat.size))
    exchange.prepare(layout)
    share = share_of(exchange, 0, NUM_LEAVES)
    outcomes = [Outcome.of(combine(exchange, share, telemetry_of(seat.rank, 0)))]
    exchange.prepare(layout)
    if kind == "gloo":  # a survivor may have sent all to the victim, and then waits for another survivor
        hurry(exchange, 4 * SILENCE_S)
    share = share_of(exchange, 1, NUM_LEAVES)
    if seat.rank == victim:
        _stop_at(point, seat, exchange, share)
    whole = {node: content(slot) for node, slot in share.slots.items()}
    # A network tells that a peer is gone; in shared memory and with two levels somebody has to say so.
    if kind != "gloo":
        interrupt_when_told(exchange, seat)
    with pytest.raises((AlarmError, PeerLost, DeadlineExceeded)):
        combine(exchange, share, telemetry_of(seat.rank, 1))
    exchange.close()
    assert {node: content(slot) for node, slot in share.slots.items()} == whole

    # The head announces generation 3 (2 was over before it began): those who are left cover what is missing.
    survivors = [rank for rank in range(seat.size) if rank != victim]
    exchange = member.enter(3, survivors, later_kind)
    held = [share.plan[rank] for rank in survivors]
    kept = exchange.prepare(layout, tuple(share.slots.values()))
    same = [new is old for new, old in zip(kept, share.slots.values(), strict=True)]
    nodes = dict(zip(share.slots, kept, strict=True))
    assert {node: content(slot) for node, slot in nodes.items()} == whole
    decided = replan(held, [True] * len(survivors), NUM_LEAVES)
    compute(exchange, 1, decided.ranges[exchange.rank], NUM_LEAVES, nodes)
    combined = combine(exchange, Share(NUM_LEAVES, decided.nodes, nodes), telemetry_of(seat.rank, 1))
    outcomes.append(Outcome.of(combined))
    exchange.release(combined.slot)
    exchange.release(combined.slot)  # harmless
    outcomes.append(Outcome.of(combine(exchange, share_of(exchange, 2, NUM_LEAVES), telemetry_of(seat.rank, 2))))
    exchange.all_gather(b"")
    exchange.close()
    member.page.close()
    del exchange, combined, share, nodes, kept
    left = [now - then for now, then in zip(settled(before), before, strict=True)]
    return {"outcomes": outcomes, "same": same, "left": left}


def _check_survivors(results: list[Any], victim: int) -> None:
    assert results[victim] == KILLED
    for result in (result for result in results if result != KILLED):
        assert result["outcomes"] == [expected(0, step, NUM_LEAVES) for step in range(3)]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 2])
@every_team
def test_survivors_of_a_kill_keep_their_nodes_and_get_the_same_bits(
    kind: str, size: int, victim: int, point: str, tmp_path: pathlib.Path
) -> None:
    """SIGKILL inside a combine: the others' waits end, their nodes are unharmed and stay where they are."""
    with Team(size, _survive, kind, str(tmp_path), point, victim, "") as team:
        assert team.hear(victim) == point
        team.kill(victim)
        if kind != "gloo":
            for rank in set(range(size)) - {victim}:
                team.say(rank, "a member was killed")
        results = team.results()
    _check_survivors(results, victim)
    for result in (result for result in results if result != KILLED):
        assert all(result["same"]), "a node was copied"
        if kind != "two-level":  # its lanes are abandoned with operations that end at their timeout
            assert result["left"][0] <= 0, "file descriptors"
            assert result["left"][1] <= 1, "threads"  # one may still listen for the interrupt


@pytest.mark.parametrize(
    ("kind", "size", "later_kind"),
    [
        ("shared", 2, "alone"),
        ("shared", 3, "gloo"),
        ("shared", 4, "two-level"),
        ("gloo", 2, "alone"),
        ("gloo", 3, "shared"),
        ("two-level", 4, "shared"),
        ("two-level", 4, "gloo"),
    ],
)
def test_nodes_move_to_another_kind_of_exchange(kind: str, size: int, later_kind: str, tmp_path: pathlib.Path) -> None:
    """The survivors may be on one host, or be one: the next exchange takes the nodes, or copies them."""
    with Team(size, _survive, kind, str(tmp_path), "published", 1, later_kind) as team:
        assert team.hear(1) == "published"
        team.kill(1)
        if kind != "gloo":
            for rank in set(range(size)) - {1}:
                team.say(rank, "a member was killed")
        _check_survivors(team.results(), 1)


# -- the subtle ones, in one process -----------------------------------------------------------------


def combine_late(exchange: Exchange, share: Share, event: threading.Event) -> None:
    """Read the nodes that others have published when something has happened to them."""
    current = exchange.begin(share)
    current.publish()
    event.wait()
    current.reduce()
    current.commit(telemetry_of(exchange.rank, 1))


def test_a_member_that_leaves_while_its_nodes_are_read_spoils_no_commit(pair: Pair) -> None:
    """It has said that its own chunk is done, is interrupted, and changes its node under the other's hands."""
    one, other = pair.members
    shares = pair.prepared(layouts()[0])
    left = threading.Event()

    def leave() -> None:
        when_blocked_in({"_await_commit"}, lambda: one.interrupt(AlarmError()))
        try:
            combine(one, shares[0], telemetry_of(0, 1))
        finally:
            for slot in shares[0].slots.values():
                slot.memory.fill_(1)
            left.set()

    outcomes = together(leave, lambda: combine_late(other, shares[1], left))
    assert isinstance(outcomes[0], AlarmError)
    assert isinstance(outcomes[1], PeerLost)


def test_changed_nodes_do_not_leave_a_host() -> None:
    """With two levels a spoiled sum would be committed on the other host, where nobody has seen anyone leave."""
    before = resources()[0], sys.maxsize  # a thread that torch starts with the first group of a process stays
    pages, hosts = [WorkerPage() for _ in range(3)], (range(2), range(2, 3))
    store = dist.HashStore()
    members = [
        two_level.build(
            Context(
                generation=1,
                rank=rank,
                hosts=hosts,
                device=CPU,
                timeout_s=WAIT_S / 16,
                store=lambda name: dist.PrefixStore(name, store),
                page=page,
                pages=[other.address for other in pages],
            )
        )
        for rank, page in enumerate(pages)
    ]
    together(*(lambda m=m: m.prepare(layouts()[0]) for m in members))
    shares = [share_of(member, 1, 3) for member in members]
    left = threading.Event()

    def leave() -> None:
        when_blocked_in({"_await_commit"}, lambda: members[1].interrupt(AlarmError()))
        try:
            combine(members[1], shares[1], telemetry_of(1, 1))
        finally:
            for slot in shares[1].slots.values():
                slot.memory.fill_(1)
            left.set()

    def carry() -> None:
        try:
            combine_late(members[0], shares[0], left)
        finally:
            members[0].close()
            members[2].interrupt(PeerLost("it has left"))  # as by the head: a pending receive may keep the connection

    outcomes = together(carry, leave, lambda: combine(members[2], shares[2], telemetry_of(2, 1)))
    for member in members:
        member.close()
    for page in pages:
        page.close()
    found = [type(outcome) for outcome in outcomes]
    outcomes.clear()
    assert found == [PeerLost, AlarmError, PeerLost]
    settled(before, WAIT_S / 8)  # what waits for a message of a member that has closed ends with its timeout


def test_a_member_that_leaves_ends_the_waits_of_the_others(pair: Pair) -> None:
    """At once, not at the deadline: nobody has to tell them."""
    pair.members[0].interrupt(AlarmError())

    def leave() -> None:
        pair.members[0].all_gather(b"")

    def wait() -> None:
        when_blocked_in(BLOCKING, lambda: blocked.set())
        pair.members[1].prepare(layouts()[1])

    def leave_late() -> None:
        blocked.wait()
        leave()

    blocked = threading.Event()
    outcomes = together(leave_late, wait)
    assert [type(outcome) for outcome in outcomes] == [AlarmError, PeerLost]


def _combine_often(seat: Seat, path: str) -> None:
    exchange = Member("gloo", seat, path).enter(1, range(seat.size))
    exchange.prepare(layouts()[0])
    for step in range(21):
        share = share_of(exchange, step, 2)
        exchange.all_gather(b"")
        exchange.release(combine(exchange, share, telemetry_of(seat.rank, step)).slot)
    exchange.close()


def _cannot_be_connected(seat: Seat, path: str) -> str:
    store = dist.FileStore(path, -1)
    store.set("here-1", "")  # it is there, and nobody can connect to it
    wire = Wire(store, 0, 2, device=CPU, address="127.0.0.1", timeout_s=10 * WAIT_S)
    with pytest.raises(DeadlineExceeded) as raised:
        wire.all_gather_equal(b"x")
    wire.close()
    return str(raised.value)


def test_who_is_there_and_cannot_be_connected_is_not_waited_for_as_long_as_for_an_exchange(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one behind a firewall."""
    monkeypatch.setattr("unisono.engine.exchange.wire.CONNECT_S", 0.5)
    with Team(1, _cannot_be_connected, str(tmp_path / "store")) as team:
        (told,) = team.results()
    assert "2 members could not be connected within 0.5 s" in told
    assert "look for a firewall" in told


def _one_does_not_come(seat: Seat) -> tuple[str, tuple[str, ...]]:
    wire = Wire(dist.HashStore(), 0, 2, device=CPU, address="127.0.0.1", timeout_s=0.2, names=["w4", "w7"])
    with pytest.raises(PeerLost) as raised:
        wire.all_gather_equal(b"x")
    wire.close()
    return str(raised.value), raised.value.peers


def test_the_error_of_a_wire_names_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the store has told: a process that stood still meanwhile must not give up a moment before."""
    monkeypatch.setattr("unisono.engine.exchange.wire.FORM_GRACE_S", WAIT_S)
    with Team(1, _one_does_not_come) as team:
        ((told, peers),) = team.results()
    assert peers == ("w7",)
    assert "not there: w7" in told


def test_a_wait_on_a_wire_ends_when_its_operation_does(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the waiting thread happens to look again, which it does not within this test."""
    defaults = Wire._await.__defaults__
    assert defaults is not None
    monkeypatch.setattr(Wire._await, "__defaults__", (10 * WAIT_S, *defaults[1:]))
    with Team(2, _combine_often, str(tmp_path)) as team:
        assert team.results() == [None, None]


def test_whoever_sees_the_commit_has_committed_though_it_is_interrupted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters count before the interrupt does."""
    shares = pair.prepared(layouts()[0])
    over = threading.Event()
    wait = Counters.wait

    def wait_late(counters: Counters, name: str, value: int, ranks: Collection[int] | None = None) -> None:
        if name == "reduced" and counters.rank == 1:
            over.wait()
            pair.members[1].interrupt(AlarmError())
        wait(counters, name, value, ranks)

    monkeypatch.setattr(Counters, "wait", wait_late)

    def first() -> Outcome:
        outcome = Outcome.of(combine(pair.members[0], shares[0], telemetry_of(0, 1)))
        over.set()
        return outcome

    def second() -> Outcome:
        return Outcome.of(combine(pair.members[1], shares[1], telemetry_of(1, 1)))

    assert together(first, second) == [expected(0, 1, 2)] * 2


class Lost(Exception):
    """A member comes to the place where it is lost."""


@pytest.mark.parametrize("place", POINTS)
def test_a_member_that_leaves_between_two_phases_commits_nothing(place: str, pair: Pair) -> None:
    """Neither for itself nor for the other; both go on from the same nodes."""
    layout = layouts()[0]
    shares = pair.prepared(layout)
    wholes = [[content(slot) for slot in share.slots.values()] for share in shares]

    def leave() -> None:
        advance(place, pair.members[0], shares[0])
        pair.members[0].close()
        raise Lost

    def stay() -> Outcome:
        try:
            return Outcome.of(combine(pair.members[1], shares[1], telemetry_of(1, 1)))
        finally:
            pair.members[1].close()

    outcomes = together(leave, stay)
    assert [type(outcome) for outcome in outcomes] == [Lost, PeerLost]
    assert [[content(slot) for slot in share.slots.values()] for share in shares] == wholes
    members = [pair.enter(rank, 2) for rank in range(2)]

    def again(rank: int) -> Outcome:
        kept = members[rank].prepare(layout, tuple(shares[rank].slots.values()))
        share = Share(2, shares[rank].plan, dict(zip(shares[rank].slots, kept, strict=True)))
        return Outcome.of(combine(members[rank], share, telemetry_of(rank, 1)))

    assert together(lambda: again(0), lambda: again(1)) == [expected(0, 1, 2)] * 2


def _die_after_commit(seat: Seat, kind: str, path: str) -> Outcome:
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    exchange.prepare(layouts()[0])
    current = exchange.begin(share_of(exchange, 1, NUM_LEAVES))
    current.publish()
    current.reduce()
    committed = current.commit(telemetry_of(seat.rank, 1))
    seat.say("committed")
    seat.hear()
    exchange.interrupt(AlarmError())  # as the head does when it hears of a loss
    return Outcome(committed.digest, content(current.collect()))


@every_team
def test_whoever_sees_the_commit_collects_all_without_the_others(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """All but one die when all have committed, and nobody has collected anything."""
    with Team(size, _die_after_commit, kind, str(tmp_path)) as team:
        for rank in range(size):
            assert team.hear(rank) == "committed"
        for rank in range(1, size):
            team.kill(rank)
        team.say(0, "go on")
        assert team.results() == [expected(0, 1, NUM_LEAVES), *[KILLED] * (size - 1)]


def test_work_that_is_shown_after_a_combine_is_work_for_the_next(pair: Pair) -> None:
    layout = layouts()[0]
    shares = pair.prepared(layout)
    one, other = pair.members
    together(
        lambda: combine(one, shares[0], telemetry_of(0, 0)),
        lambda: combine(other, shares[1], telemetry_of(1, 0)),
    )
    idle, late = one.helping, other.helping
    idle.show_work([])
    late.show_work([3, 4, 5])
    assert idle.take([1.0, 1.0], elapsed_s=9.0) == 5
    one.begin(Share(2, shares[0].plan, {})).publish()
    assert idle.take([1.0, 1.0], elapsed_s=9.0) is None, "it has shown its nodes, and takes no more leaves"


def test_members_skip_generations_and_are_not_mixed_up(pair: Pair) -> None:
    """One is in generation 2 when the other has gone on to 4; in 5 they meet, and count from the start again."""
    early = pair.enter(0, 2)
    pair.enter(1, 4).close()
    with pytest.raises(PeerLost, match="generation 2"):
        early.all_gather(b"")
    both = [pair.enter(rank, 5) for rank in range(2)]
    outcomes = together(*(lambda m=m: m.all_gather(b"%d" % m.rank) for m in both))
    assert outcomes == [[b"0", b"1"]] * 2
    with pytest.raises(ValueError, match="only grow"):
        pair.enter(0, 5)


def test_a_counter_may_pass_its_end(pair: Pair) -> None:
    """32 bits last for weeks of combines, not for ever."""
    for member in pair.members:
        own = member.counters.own
        own.counters["posted"].value = own.counters["read"].value = 2**32 - 2
    for round_ in range(4):
        outcomes = together(*(lambda m=m: m.all_gather(b"%d" % m.rank) for m in pair.members))
        assert outcomes == [[b"0", b"1"]] * 2, f"round {round_}"


def test_prepare_frees_what_is_not_kept(pair: Pair) -> None:
    """Slots of the same layout are used again, those of another are closed; a late release harms nobody."""
    page = pair.pages[0]
    exchange = shared_memory([page], 0, generation=2, timeout_s=10)
    exchange.prepare(layouts()[0])
    kept, forgotten = exchange.slot(), exchange.slot()
    before = num_descriptors()
    assert exchange.prepare(layouts()[0], [kept]) == [kept]
    assert exchange.slot() is forgotten
    assert num_descriptors() == before
    exchange.release(forgotten)
    exchange.release(forgotten)
    one, another = exchange.slot(), exchange.slot()
    assert one is not another
    exchange.prepare(layouts()[1])
    exchange.release(kept)
    assert exchange.slot().layout == layouts()[1]
    with pytest.raises(ValueError, match="another layout"):
        exchange.prepare(layouts()[0], [exchange.slot()])
    exchange.close()


def test_a_member_without_leaves_waits_for_those_who_have_not_shown_theirs(pair: Pair) -> None:
    """It may be there first, and would begin the combine before anybody could be helped."""
    together(*(lambda member=member: member.all_gather(b"") for member in pair.members))
    idle, late = (member.helping for member in pair.members)
    idle.show_work([])
    assert idle.pause(0.001)
    late.show_work([3, 4, 5])
    assert [idle.take([1.0, 1.0], elapsed_s=9.0) for _ in range(3)] == [5, 4, None]
    assert not idle.pause(0.001)
    assert [late.start(index, leaf) for index, leaf in enumerate([3, 4, 5])] == [True, False, False]


def test_the_error_of_a_wait_names_the_worker_that_was_waited_for() -> None:
    pages = [WorkerPage() for _ in range(2)]
    one, other = (shared_memory(pages, rank, generation=1, timeout_s=0.05, names=["w4", "w7"]) for rank in range(2))
    told = [(type(error), str(error), error.peers) for error in (error_of_gather(one), error_of_gather(other))]
    for exchange in (one, other):
        exchange.close()
    for page in pages:
        page.close()
    del one, other, exchange, page, pages
    gc.collect()  # a page refers to itself, and holds its memory
    (late, waited, late_peers), (lost, left, lost_peers) = told
    assert (late, late_peers) == (DeadlineExceeded, ("w7",))
    assert "waited 0 s for worker w7 in generation 1" in waited
    assert (lost, lost_peers) == (PeerLost, ("w4",))
    assert "worker w4 has left generation 1" in left


def error_of_gather(exchange: SharedMemory) -> DeadlineExceeded | PeerLost:
    """Without its frames, which hold the memory of all members."""
    try:
        exchange.all_gather(b"")
    except (DeadlineExceeded, PeerLost) as error:
        return error.with_traceback(None)
    raise AssertionError("it has met somebody")


def test_limits_are_said(pair: Pair) -> None:
    page = pair.pages[0]
    exchange = shared_memory([page], 0, generation=2, timeout_s=10)
    exchange.prepare(layouts()[1])
    slot, num_leaves = exchange.slot(), 2 * MAX_NODES + 2
    nodes = {Node(0, 2 * index): slot for index in range(MAX_NODES + 1)}
    with pytest.raises(RecipeError, match=f"holds {MAX_NODES + 1} nodes.*can publish {MAX_NODES}"):
        combine(exchange, Share(num_leaves, (tuple(nodes),), nodes), telemetry_of(0, 0))
    exchange.close()
    counters = Counters(page, [page.address], 0, generation=3, timeout_s=10)
    with pytest.raises(UsageError, match=f"{MAX_TEAM + 1} workers"):
        TwoLevel(counters, None, hosts=[range(1), range(1, MAX_TEAM + 1)], rank=0)
    counters.close()


def test_an_address_never_means_another_segment() -> None:
    """Descriptors are used again, stamps are not; and an opened segment outlives its creator's interest."""
    first = Segment.create(100)
    opened = Segment.open(first.address)
    first.tensor()[7] = 42
    descriptor = int(first.address.rsplit("/", 1)[1])
    first.close()
    first.close()
    assert opened.tensor()[7] == 42
    for size in (100, 5000):
        other = Segment.create(size)
        assert int(other.address.rsplit("/", 1)[1]) == descriptor
        with pytest.raises(FileNotFoundError, match="is gone"):
            Segment.open(first.address)
        other.close()
    with pytest.raises(FileNotFoundError, match="is gone"):
        Segment.open(first.address)


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        (resource.RLIMIT_FSIZE, 4096, r"5,000 bytes .*: File too large \(the limit is 4,096 bytes\); ulimit"),
        (resource.RLIMIT_NOFILE, 3, r"5,000 bytes .*: Too many open files; ulimit -n"),
    ],
)
def test_memory_that_a_process_may_not_have_is_not_the_loss_of_another(limit: int, value: int, said: str) -> None:
    """Whoever takes it for one tries again with the same others, and again."""
    there = Segment.create(4000)
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        with pytest.raises(UsageError, match=said):
            Segment.create(5000)
        if limit == resource.RLIMIT_NOFILE:
            with pytest.raises(UsageError, match="Too many open files"):
                Segment.open(there.address)
    finally:
        resource.setrlimit(limit, before)
        there.close()


def test_payloads_that_grow_do_not_leave_their_memory_behind(pair: Pair) -> None:
    """Whoever reads a payload keeps its segment mapped as long as the generation lives."""
    sizes = range(10_000, 100_000, 1000)

    def post(member: SharedMemory) -> None:
        for size in sizes:
            assert [len(each) for each in member.all_gather(b"x" * size)] == [size, size]

    together(*(lambda member=member: post(member) for member in pair.members))
    for member in pair.members:
        for page in member.counters.pages:
            assert sum(payload.numel() for payload in page.mapped.values()) < 4 * max(sizes)


def test_a_page_of_a_dead_worker_is_a_lost_peer(pair: Pair) -> None:
    """It died before this generation's exchange had met."""
    with Team(1, lambda seat: WorkerPage().address) as team:
        address = team.result(0)
    page = pair.pages[0]
    exchange = SharedMemory(Counters(page, [page.address, address], 0, generation=2, timeout_s=10))
    with pytest.raises(PeerLost):
        exchange.prepare(layouts()[1])
    exchange.close()


def test_every_field_of_a_page_has_a_name_of_its_own() -> None:
    """Of two fields of one name, ctypes gives the last one to both."""
    names = [field[0] for field in GenerationFields._fields_]
    assert len(set(names)) == len(names)
