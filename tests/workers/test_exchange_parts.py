"""A combine in several parts: the bits of one part, whatever is under way at the same time and whoever is lost."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence

import pytest

from tests.workers.exchanges import (  # fixtures among them  # noqa: F401
    CPU,
    ROUNDING,
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
    interrupt_when_told,
    layouts,
    make_pair,
    one_thread,
    share_of,
    telemetry_of,
    together,
)
from tests.workers.processes import KILLED, Seat, Team
from unisono.decisions.plan import replan
from unisono.errors import DeadlineExceeded, PeerLost
from unisono.exchange import Combine, Committed, Exchange, Handle, Share, combine
from unisono.exchange.alone import Alone
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Slot, parts_of

pytestmark = pytest.mark.more

Order = Callable[[int], list[tuple[str, int]]]
"""For a number of parts: what is called until the commit, in this order. "wait" is for a reduce."""


def cut(layout: FlatLayout, *edges: int) -> list[range]:
    """Parts that begin at these rows; negative ones count from the end."""
    rows = [0, *(edge % layout.num_rows for edge in edges), layout.num_rows]
    return [range(a, b) for a, b in itertools.pairwise(rows)]


def one_by_one(num_parts: int) -> list[tuple[str, int]]:
    return [(phase, part) for part in range(num_parts) for phase in ("publish", "reduce", "wait")]


def published_first_and_reduced_backwards(num_parts: int) -> list[tuple[str, int]]:
    reduced = [(phase, part) for part in reversed(range(num_parts)) for phase in ("reduce", "wait")]
    return [*(("publish", part) for part in range(num_parts)), *reduced]


def all_begun_before_the_first_wait(num_parts: int) -> list[tuple[str, int]]:
    return [(phase, part) for phase in ("publish", "reduce", "wait") for part in range(num_parts)]


def the_next_published_while_one_is_reduced(num_parts: int) -> list[tuple[str, int]]:
    ahead = [("publish", part) for part in range(1, num_parts)]
    steps = [[("reduce", part), *ahead[part : part + 1], ("wait", part)] for part in range(num_parts)]
    return [("publish", 0), *itertools.chain(*steps)]


ORDERS: list[Order] = [
    one_by_one,
    published_first_and_reduced_backwards,
    all_begun_before_the_first_wait,
    the_next_published_while_one_is_reduced,
]
CUTS = [(250,), (1, -1), (7, 7), (0, 300), (-2, -1, -1)]
"""Halves; tiny ones at both ends; an empty one within, and at the beginning; the tail row by row."""
STEPS = [
    *((0, 5, edges, order) for edges in CUTS for order in ORDERS),
    (2, 3, (9000,), the_next_published_while_one_is_reduced),
    (1, 6, (1,), all_begun_before_the_first_wait),
    (ROUNDING, 13, (1, 2000, -3), all_begun_before_the_first_wait),
]
"""Layout, leaves, cuts, order."""


def advance(current: Combine, calls: Sequence[tuple[str, int]], on_publish: Callable[[int], None]) -> None:
    """Make these calls."""
    reductions = dict[int, Handle[None]]()
    for phase, part in calls:
        if phase == "publish":
            on_publish(part)
            current.publish(part)
        elif phase == "reduce":
            reductions[part] = current.reduce(part)
        else:
            reductions[part].wait()


def commit_in_parts(
    current: Combine, share: Share, parts: Sequence[range], calls: Sequence[tuple[str, int]], telemetry: bytes
) -> Committed:
    """Go as far as the commit. The rows of a part get their values when it is published, and not before."""
    values = [(slot, slot.memory.clone()) for slot in share.slots.values()]
    for slot, _ in values:
        slot.rows(0, slot.layout.num_rows).fill_(0xAB)

    def complete(part: int) -> None:
        first, end = parts[part].start * ROW_BYTES, parts[part].stop * ROW_BYTES
        for slot, value in values:
            slot.memory[first:end] = value[first:end]

    try:
        advance(current, calls, complete)
        return current.commit(telemetry).wait()
    except BaseException:
        for part in range(len(parts)):
            complete(part)
        raise


def collect(current: Combine, num_parts: int, committed: Committed, out: Slot) -> Outcome:
    for part in reversed(range(num_parts)):
        current.collect(part, out).wait()
    return Outcome(committed.digest, content(out))


# -- the same bits -----------------------------------------------------------------------------------


def _all_steps(seat: Seat, kind: str, path: str) -> list[Outcome]:
    made = layouts()
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    outcomes, prepared = [], -1
    known: set[int] = set()
    for step, (layout, num_leaves, edges, order) in enumerate(STEPS):
        if layout != prepared:
            exchange.prepare(made[layout])
            prepared, known = layout, set()
        share, parts = share_of(exchange, step, num_leaves), cut(made[layout], *edges)
        current = exchange.begin(share, parts)
        told = telemetry_of(seat.rank, step)
        committed = commit_in_parts(current, share, parts, order(len(parts)), told)
        assert committed.telemetry == tuple(telemetry_of(rank, step) for rank in range(seat.size))
        # Into the slot that the exchange offers, or into another one.
        out = exchange.slot() if step % 2 else current.result()
        outcomes.append(collect(current, len(parts), committed, out))
        for slot in {each.key: each for each in [*share.slots.values(), out]}.values():
            known.add(slot.key)
            exchange.release(slot)
        assert len(known) <= num_leaves + 3, "slots are used again"
        plain = share_of(exchange, step, num_leaves)  # in one part, in between
        outcomes.append(Outcome.of(whole := combine(exchange, plain, told)))
        exchange.release(whole.slot)
    exchange.all_gather(b"")
    exchange.close()
    return outcomes


@every_kind
def test_parts_give_the_bits_of_one_part(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """However the rows are cut, and whatever is under way at the same time."""
    with Team(size, _all_steps, kind, str(tmp_path)) as team:
        results = team.results()
    for outcomes in results:
        for step, (layout, num_leaves, edges, order) in enumerate(STEPS):
            right = expected(layout, step, num_leaves)
            assert outcomes[2 * step] == right, f"step {step}: cut at {edges}, {order.__name__}"
            assert outcomes[2 * step + 1] == right, f"step {step}, in one part"


# -- a member is lost --------------------------------------------------------------------------------

NUM_LEAVES = 9
EDGES = (250,)
CALLS = the_next_published_while_one_is_reduced(2)
BEFORE = ["publish 1", "wait 0", "wait 1", "commit"]
"""Where a member is lost: part 0 is published; both are; the first is reduced; both are, and nothing was said."""


class Lost(Exception):
    """A member comes to the place where it is lost."""


def calls_before(place: str) -> list[tuple[str, int]]:
    names = [f"{phase} {part}" for phase, part in CALLS]
    return CALLS[: names.index(place)] if place in names else CALLS


def lose_at(place: str, exchange: Exchange, share: Share, layout: FlatLayout) -> None:
    """Take part until that place."""
    advance(exchange.begin(share, cut(layout, *EDGES)), calls_before(place), lambda part: None)


def in_parts(exchange: Exchange, share: Share, layout: FlatLayout, telemetry: bytes) -> Outcome:
    parts = cut(layout, *EDGES)
    current = exchange.begin(share, parts)
    committed = commit_in_parts(current, share, parts, CALLS, telemetry)
    return collect(current, len(parts), committed, current.result())


def _survive(seat: Seat, kind: str, path: str, place: str, victim: int) -> list[Outcome]:
    member, layout = Member(kind, seat, path), layouts()[0]
    exchange = member.enter(1, range(seat.size))
    exchange.prepare(layout)
    share = share_of(exchange, 0, NUM_LEAVES)
    outcomes = [in_parts(exchange, share, layout, telemetry_of(seat.rank, 0))]
    exchange.prepare(layout)
    share = share_of(exchange, 1, NUM_LEAVES)
    if seat.rank == victim:
        lose_at(place, exchange, share, layout)
        seat.say(place)
        seat.hear()
    interrupt_when_told(exchange, seat)
    whole = {node: content(slot) for node, slot in share.slots.items()}
    with pytest.raises((AlarmError, PeerLost, DeadlineExceeded)):
        in_parts(exchange, share, layout, telemetry_of(seat.rank, 1))
    exchange.close()
    assert {node: content(slot) for node, slot in share.slots.items()} == whole

    survivors = [rank for rank in range(seat.size) if rank != victim]
    exchange = member.enter(3, survivors)
    nodes = dict(zip(share.slots, exchange.prepare(layout, tuple(share.slots.values())), strict=True))
    decided = replan([share.plan[rank] for rank in survivors], [True] * len(survivors), NUM_LEAVES)
    compute(exchange, 1, decided.ranges[exchange.rank], NUM_LEAVES, nodes)
    again = Share(NUM_LEAVES, decided.nodes, nodes)
    outcomes.append(in_parts(exchange, again, layout, telemetry_of(seat.rank, 1)))
    exchange.all_gather(b"")
    exchange.close()
    return outcomes


@pytest.mark.parametrize("place", BEFORE)
@every_team
def test_a_kill_between_two_phases_leaves_survivors_that_do_it_again(
    kind: str, size: int, place: str, tmp_path: pathlib.Path
) -> None:
    """Their nodes are unharmed, nothing is committed, and the next generation gets the same bits."""
    victim = 1
    with Team(size, _survive, kind, str(tmp_path), place, victim) as team:
        assert team.hear(victim) == place
        team.kill(victim)
        for rank in set(range(size)) - {victim}:
            team.say(rank, "a member was killed")
        results = team.results()
    assert results[victim] == KILLED
    for result in (result for result in results if result != KILLED):
        assert result == [expected(0, step, NUM_LEAVES) for step in range(2)]


@pytest.mark.parametrize("place", BEFORE)
def test_a_member_that_leaves_between_two_phases_commits_no_part(place: str, pair: Pair) -> None:
    """Neither for itself nor for the other; both go on from the same nodes."""
    layout = layouts()[0]
    shares = pair.prepared(layout)
    wholes = [[content(slot) for slot in share.slots.values()] for share in shares]

    def leave() -> None:
        lose_at(place, pair.members[0], shares[0], layout)
        pair.members[0].close()
        raise Lost

    def stay() -> Outcome:
        try:
            return in_parts(pair.members[1], shares[1], layout, telemetry_of(1, 1))
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
    layout = layouts()[0]
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    exchange.prepare(layout)
    share, parts = share_of(exchange, 1, NUM_LEAVES), cut(layout, *EDGES)
    current = exchange.begin(share, parts)
    committed = commit_in_parts(current, share, parts, CALLS, telemetry_of(seat.rank, 1))
    seat.say("committed")
    seat.hear()
    exchange.interrupt(AlarmError())  # as the head does when it hears of a loss
    return collect(current, len(parts), committed, current.result())


@every_team
def test_whoever_sees_the_commit_collects_every_part_without_the_others(
    kind: str, size: int, tmp_path: pathlib.Path
) -> None:
    """All but one die when all have committed, and nobody has collected anything."""
    with Team(size, _die_after_commit, kind, str(tmp_path)) as team:
        for rank in range(size):
            assert team.hear(rank) == "committed"
        for rank in range(1, size):
            team.kill(rank)
        team.say(0, "go on")
        assert team.results() == [expected(0, 1, NUM_LEAVES), *[KILLED] * (size - 1)]


# -- what goes with it -------------------------------------------------------------------------------


def test_a_combine_in_parts_is_one_combine_for_who_helps(pair: Pair) -> None:
    """Work that is shown after it is work for the next, whatever number of parts it had."""
    layout = layouts()[0]
    shares = pair.prepared(layout)
    one, other = pair.members
    together(
        lambda: in_parts(one, shares[0], layout, telemetry_of(0, 0)),
        lambda: in_parts(other, shares[1], layout, telemetry_of(1, 0)),
    )
    idle, late = one._host.work, other._host.work
    idle.show_work([])
    late.show_work([3, 4, 5])
    assert idle.take([1.0, 1.0], elapsed_s=9.0) == 5
    current = one.begin(shares[0], cut(layout, *EDGES))
    current.publish(0)
    assert idle.take([1.0, 1.0], elapsed_s=9.0) is None, "it has shown its nodes, and takes no more leaves"


@pytest.mark.parametrize("parts", [[], [range(3)], [range(5), range(3, 3)], [range(1, 494)], [range(0, 494, 2)]])
def test_parts_that_do_not_cover_the_rows_are_refused(parts: list[range]) -> None:
    layout = layouts()[0]
    with pytest.raises(ValueError, match=f"must cover its {layout.num_rows} rows in order"):
        parts_of(layout, parts)


def test_a_commit_waits_for_the_reduce_of_every_part() -> None:
    layout = layouts()[0]
    exchange = Alone(CPU)
    exchange.prepare(layout)
    current = exchange.begin(share_of(exchange, 0, 1), cut(layout, *EDGES))
    current.publish(0)
    current.publish(1)
    current.reduce(0).wait()
    current.reduce(1)
    with pytest.raises(ValueError, match=r"not reduced: \[1\]"):
        current.commit(telemetry_of(0, 0))


def _offer_and_begin_in_parts(seat: Seat, path: str) -> None:
    layout = layouts()[0]
    exchange = Member("gloo", seat, path).enter(1, range(1))
    exchange.prepare(layout)
    share = share_of(exchange, 0, 1)
    exchange.offer(share, layout.num_rows)
    with pytest.raises(ValueError, match="in one part"):
        exchange.begin(share, cut(layout, *EDGES))
    exchange.close()


def test_rows_that_were_offered_are_of_a_combine_in_one_part(tmp_path: pathlib.Path) -> None:
    with Team(1, _offer_and_begin_in_parts, str(tmp_path)) as team:
        assert team.results() == [None]
