"""Delivery: in which rounds, and by whom, the bytes of tensors come from members that have them to those in need.

The bytes are cut into **slices** that fit memory of a fixed size, and the slices into **rounds**. A round has up to
three stops, of which each slice makes those that it needs:

1. **departing**: the slice's source writes it into memory that its host shares; the targets on that host read it;
2. **crossing**: one member of the host, the carrier, sends it to the carriers of the hosts that need it;
3. **arriving**: each of these writes it into memory that its host shares; the targets on its host read it.

The members of all hosts with the same local rank are a **lane**; the slices of a round that cross are spread over the
lanes. Pure: all members get the same rounds for the same parcels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["Freight", "HostStop", "Leg", "Slice", "Turn", "check_freight", "cut", "turns_of"]


NUMBER_BYTES: Final = 8
"""Of the widest numbers; slices of parcels are cut between them, where there is room for one."""


class Freight(NamedTuple):
    """What is known of a parcel on all members."""

    source: int
    targets: tuple[int, ...]
    nbytes: int


class Slice(NamedTuple):
    """Bytes ``[start, stop)`` of a parcel. ``lane``: in which they cross; -1: they stay on their host."""

    parcel: int
    start: int
    stop: int
    lane: int


class Leg(NamedTuple):
    """A slice in the memory that the members of a host share. Members by their local ranks."""

    part: Slice
    writer: int
    position: int
    """Where it begins in the writer's memory."""
    readers: tuple[int, ...]


@dataclass(frozen=True)
class HostStop:
    """What one member does in the shared memory of its host, departing or arriving."""

    is_made: bool
    """Whether any member of the host does anything."""
    writes: tuple[Leg, ...]
    readers: tuple[int, ...]
    """Who reads what this member writes, by their local ranks."""
    reads: tuple[Leg, ...]
    """From the next member on, so that not all read from the first one at the same time."""


@dataclass(frozen=True)
class Turn:
    """A round, as one member sees it."""

    loads: tuple[Slice, ...]
    """Those whose source is this member."""
    departing: HostStop
    sent: tuple[tuple[Slice, ...], ...]
    """By host, what this member carries there from its own."""
    received: tuple[tuple[Slice, ...], ...]
    """By host, what this member gets from there for its own."""
    crosses: bool
    """Whether this member's lane carries anything, between whichever hosts."""
    arriving: HostStop


def check_freight(freight: Sequence[Freight], size: int) -> None:
    """Raise ValueError unless sources and targets are ranks of ``size`` members, and no source is its own target."""
    for index, (source, targets, _) in enumerate(freight):
        everyone = (source, *targets)
        if min(everyone) < 0 or max(everyone) >= size or len(set(everyone)) < len(everyone):
            raise ValueError(
                f"parcel {index} goes from rank {source} to {list(targets)}: these must be different ranks of {size} "
                "members, without the source"
            )


def cut(freight: Sequence[Freight], hosts: Sequence[range], room: int) -> list[list[Slice]]:
    """Return the slices of each round, by source and in the order of the parcels.

    Args:
        room: bytes that one member can write into shared memory in a round; more than there are members.
    """
    host_of = {rank: index for index, ranks in enumerate(hosts) for rank in ranks}
    num_lanes = min(map(len, hosts))
    crossing = {source for source, targets, nbytes in freight if nbytes and _others(source, targets, host_of)}
    each = _whole(min(room, max(1, room * num_lanes // (len(crossing) + 1))))
    by_source: dict[int, list[list[Slice]]] = {}
    rooms: dict[int, int] = {}
    for index, (source, targets, nbytes) in enumerate(freight):
        crosses = bool(_others(source, targets, host_of))
        limit = _whole(max(1, each // num_lanes)) if crosses else each
        start = 0
        while targets and start < nbytes:
            if not rooms.get(source):
                by_source.setdefault(source, []).append([])
                rooms[source] = each
            stop = min(nbytes, start + min(limit, rooms[source]))
            by_source[source][-1].append(Slice(index, start, stop, 0 if crosses else -1))
            rooms[source] -= stop - start
            start = stop
    rounds = []
    for number in range(max(map(len, by_source.values()), default=0)):
        slices = [
            part
            for source in sorted(by_source)
            if number < len(by_source[source])
            for part in by_source[source][number]
        ]
        rounds.append(_spread(slices, num_lanes))
    return rounds


def _whole(nbytes: int) -> int:
    """Return fewer bytes rather than a part of a number."""
    return nbytes // NUMBER_BYTES * NUMBER_BYTES or nbytes


def _others(source: int, targets: Sequence[int], host_of: dict[int, int]) -> list[int]:
    """Return the hosts, ascending, of those targets that are not on the host of the source."""
    return sorted({host_of[target] for target in targets} - {host_of[source]})


def _spread(slices: Sequence[Slice], num_lanes: int) -> list[Slice]:
    """Give each slice that crosses to the lane that has the fewest bytes so far."""
    loads = [0] * num_lanes
    spread = []
    for part in slices:
        if part.lane >= 0:
            lane = loads.index(min(loads))
            loads[lane] += part.stop - part.start
            part = part._replace(lane=lane)
        spread.append(part)
    return spread


@functools.lru_cache(maxsize=8)
def turns_of(freight: tuple[Freight, ...], hosts: tuple[range, ...], rank: int, room: int) -> tuple[Turn, ...]:
    """Return the rounds as member ``rank`` sees them; every member of a host makes the same stops.

    Args:
        hosts: by index, the ranks of each host's members: contiguous and ascending.
        room: see `cut`.
    """
    host_of = {rank: index for index, ranks in enumerate(hosts) for rank in ranks}
    return tuple(_turn(slices, freight, hosts, host_of, rank) for slices in cut(freight, hosts, room))


def _turn(
    slices: Sequence[Slice], freight: Sequence[Freight], hosts: Sequence[range], host_of: dict[int, int], rank: int
) -> Turn:
    here = host_of[rank]
    local = rank - hosts[here].start
    departing: list[tuple[Slice, int, set[int]]] = []
    arriving: list[tuple[Slice, int, set[int]]] = []
    sent: list[list[Slice]] = [[] for _ in hosts]
    received: list[list[Slice]] = [[] for _ in hosts]
    for part in slices:
        source, targets, _ = freight[part.parcel]
        home, others = host_of[source], _others(source, targets, host_of)
        readers = {target - hosts[here].start for target in targets if host_of[target] == here}
        if home == here:
            carriers = {part.lane} if others else set()
            departing.append((part, source - hosts[here].start, readers | carriers))
        elif readers:
            arriving.append((part, part.lane, readers))
        if part.lane == local and home == here:
            for other in others:
                sent[other].append(part)
        elif part.lane == local and here in others:
            received[home].append(part)
    return Turn(
        tuple(part for part in slices if freight[part.parcel].source == rank),
        _stop(departing, local, len(hosts[here])),
        tuple(map(tuple, sent)),
        tuple(map(tuple, received)),
        any(part.lane == local for part in slices),
        _stop(arriving, local, len(hosts[here])),
    )


def _stop(parts: Sequence[tuple[Slice, int, set[int]]], local: int, size: int) -> HostStop:
    """Return what member ``local`` of ``size`` does, from (slice, writer, who needs it)."""
    ends = [0] * size
    legs = []
    for part, writer, needed in parts:
        if readers := needed - {writer}:
            legs.append(Leg(part, writer, ends[writer], tuple(sorted(readers))))
            ends[writer] += part.stop - part.start
    writes = tuple(leg for leg in legs if leg.writer == local)
    reads = sorted((leg for leg in legs if local in leg.readers), key=lambda leg: (leg.writer - local) % size)
    return HostStop(bool(legs), writes, tuple(sorted({each for leg in writes for each in leg.readers})), tuple(reads))
