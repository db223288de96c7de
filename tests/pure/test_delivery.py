"""Delivery: every target gets every byte once, whatever the pattern, and no memory is written beyond its end."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.delivery import Freight, Turn, check_freight, cut, turns_of

HOSTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def hosts_of(sizes: list[int]) -> tuple[range, ...]:
    edges = [0, *itertools.accumulate(sizes)]
    return tuple(range(a, b) for a, b in itertools.pairwise(edges))


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[tuple[Freight, ...], tuple[range, ...], int]:
    hosts = hosts_of(draw(HOSTS))
    ranks = st.integers(0, hosts[-1].stop - 1)
    freight = []
    for _ in range(draw(st.integers(0, 6))):
        source = draw(ranks)
        targets = sorted(draw(st.sets(ranks)) - {source})
        freight.append(Freight(source, tuple(targets), draw(st.sampled_from([0, 1, 7, 100, 1000]))))
    return tuple(freight), hosts, draw(st.sampled_from([50, 128, 5000]))


def travel(
    freight: tuple[Freight, ...], hosts: tuple[range, ...], room: int
) -> list[collections.Counter[tuple[int, int]]]:
    """Act the rounds out; returns by rank how often each byte (parcel, position) arrived."""
    size = hosts[-1].stop
    by_rank = [turns_of(freight, hosts, rank, room) for rank in range(size)]
    assert len({len(turns) for turns in by_rank}) == 1
    found = [collections.Counter[tuple[int, int]]() for _ in range(size)]

    def arrive(rank: int, part: tuple[int, int, int, int]) -> None:
        if rank in freight[part[0]].targets:
            found[rank].update((part[0], byte) for byte in range(part[1], part[2]))

    for turns in zip(*by_rank, strict=True):
        stages = [dict[int, object]() for _ in range(size)]
        held = [set(turn.loads) for turn in turns]
        for ranks in hosts:
            meet(ranks, turns, True, held, stages, room, arrive)
        for index, ranks in enumerate(hosts):
            for other_index, others in enumerate(hosts):
                for lane, rank in enumerate(ranks[: min(map(len, hosts))]):
                    sent, peer = turns[rank].sent[other_index], others[lane]
                    assert sent == turns[peer].received[index]
                    assert set(sent) <= held[rank]
                    assert turns[rank].crosses or not sent
                    assert turns[rank].crosses == turns[peer].crosses
                    for part in sent:
                        arrive(peer, part)
                        held[peer].add(part)
        for ranks in hosts:
            meet(ranks, turns, False, held, stages, room, arrive)
    return found


def meet(ranks, turns, is_departing, held, stages, room, arrive) -> None:  # type: ignore[no-untyped-def]
    """The members of one host make one stop."""
    stops = [turns[rank].departing if is_departing else turns[rank].arriving for rank in ranks]
    assert len({stop.is_made for stop in stops}) == 1
    written = {}
    for local, (rank, stop) in enumerate(zip(ranks, stops, strict=True)):
        end = 0
        for leg in stop.writes:
            assert leg.writer == local
            assert leg.part in held[rank]
            assert leg.position == end
            end += leg.part.stop - leg.part.start
            written[local, leg.position] = leg
        assert end <= room
        assert set(stop.readers) == {reader for leg in stop.writes for reader in leg.readers}
        assert local not in stop.readers
    reads = 0
    for local, (rank, stop) in enumerate(zip(ranks, stops, strict=True)):
        for leg in stop.reads:
            assert written[leg.writer, leg.position] == leg
            assert local in leg.readers
            arrive(rank, leg.part)
            held[rank].add(leg.part)
            reads += 1
    assert reads == sum(len(leg.readers) for leg in written.values())


@given(deliveries())
def test_every_target_gets_every_byte_once(case: tuple[tuple[Freight, ...], tuple[range, ...], int]) -> None:
    freight, hosts, room = case
    check_freight(freight, hosts[-1].stop)
    found = travel(freight, hosts, room)
    for rank, counted in enumerate(found):
        wanted = {
            (index, byte)
            for index, (_, targets, nbytes) in enumerate(freight)
            if rank in targets
            for byte in range(nbytes)
        }
        assert set(counted) == wanted
        assert set(counted.values()) <= {1}


def crossings(turns: tuple[Turn, ...]) -> int:
    return sum(part.stop - part.start for turn in turns for parts in turn.sent for part in parts)


def test_a_parcel_comes_once_to_each_host_that_needs_it_and_is_spread_over_the_lanes() -> None:
    hosts = hosts_of([2, 2, 3])
    freight = (Freight(0, (1, 2, 3, 4, 5, 6), 100_000), Freight(1, (2, 3), 5_000), Freight(2, (3,), 70_000))
    sent = [crossings(turns_of(freight, hosts, rank, 4096)) for rank in range(7)]
    assert sum(sent) == 2 * 100_000 + 5_000
    assert sent[2:] == [0] * 5
    assert abs(sent[0] - sent[1]) <= 2 * 4096


def test_small_parcels_of_one_source_travel_in_one_round() -> None:
    freight = [Freight(source, tuple({0, 1, 2} - {source}), 10) for source in (0, 1, 2) * 20]
    assert len(cut(freight, hosts_of([3]), 4096)) == 1
    assert len(cut(freight, hosts_of([1, 1, 1]), 4096)) == 1


@pytest.mark.parametrize(
    ("source", "targets"), [(0, (0, 1)), (3, (0,)), (0, (3,)), (-1, (0,)), (0, (-1,)), (0, (1, 1))]
)
def test_a_parcel_of_nobody_or_to_nobody_is_refused(source: int, targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"parcel 1 goes from rank {source}.*different ranks of 3 members"):
        check_freight([Freight(0, (1,), 4), Freight(source, targets, 4)], 3)
