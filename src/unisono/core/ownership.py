"""Who owns which parameter, where the states of an optimizer are distributed over the workers.

The unit is a whole parameter, because many updates give other bits where a parameter is cut. Each has some **owners**,
which hold its state (momentum, second moments) and compute its update. `owners` is a pure function of what all members
know, so nobody has to be asked; given what it has returned, it returns the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["MemberPlace", "Owners", "living", "owners", "senders", "shares"]

Owners = tuple[tuple[str, ...], ...]
"""By parameter: the ids of its owners. The first one sends the new values to those that own it not."""

SLACK: Final = 1.1
"""A member keeps what it has as long as nobody has more than this times what a new distribution would give it."""


class MemberPlace(NamedTuple):
    """A member and the host on which it is."""

    worker_id: str
    host: str


def living(table: Owners, worker_ids: Collection[str]) -> Owners:
    """Return the owners that are members."""
    return tuple(tuple(one for one in each if one in worker_ids) for each in table)


def shares(sizes: Sequence[int], table: Owners) -> dict[str, int]:
    """Return how much each owner owns."""
    found: dict[str, int] = {}
    for size, each in zip(sizes, table, strict=True):
        for one in each:
            found[one] = found.get(one, 0) + size
    return found


def owners(sizes: Sequence[int], members: Sequence[MemberPlace], copies: int, held: Owners = ()) -> Owners:
    """Return the owners of each parameter: as many as there are copies, on different hosts as far as there are such,
    all members with about the same sum of sizes, and those that hold a parameter before others.

    Args:
        sizes: of the parameters; what is to be balanced.
        members: of the generation, in the order of their ranks; at least one.
        copies: owners of a parameter; where there are fewer members, all of them.
        held: who owns a parameter so far; those that are no members do not count. Parameters beyond its end: nobody.
    """
    before = living((*held, *((),) * (len(sizes) - len(held))), {one.worker_id for one in members})
    fresh = _distribute(sizes, members, copies, ((),) * len(sizes))
    limit = SLACK * max(shares(sizes, fresh).values(), default=0)
    kept = _rebalanced(sizes, members, _distribute(sizes, members, copies, before), limit)
    most = max(shares(sizes, kept).values(), default=0)
    return _with_senders(sizes, kept if most <= limit else fresh)


def senders(first: int, having: Sequence[bool], hosts: Sequence[str]) -> list[tuple[int, tuple[int, ...]]]:
    """Return who sends a parameter to whom: (source, targets). It travels to those hosts on which nobody has it yet.

    Args:
        first: the rank that sends it to other hosts, one of those that have it.
        having: by rank, whether this member has it.
        hosts: by rank.
    """
    near: dict[str, int] = {}
    for rank in (first, *range(len(having))):
        if having[rank]:
            near.setdefault(hosts[rank], rank)
    found: dict[int, list[int]] = {}
    for rank, has in enumerate(having):
        if not has:
            found.setdefault(near.get(hosts[rank], first), []).append(rank)
    return [(source, tuple(found[source])) for source in sorted(found)]


def _least_first(own: Sequence[int], ranks: Iterable[int]) -> list[int]:
    """Return members in the order of what they own so far.

    Args:
        own: by rank.
    """
    return sorted(ranks, key=lambda rank: (own[rank], rank))


def _distribute(sizes: Sequence[int], members: Sequence[MemberPlace], copies: int, held: Owners) -> Owners:
    """Give each parameter its owners, the largest first, each to the member that owns least; first to those that hold
    it already.
    """
    own, chosen = [0] * len(members), {index: list[int]() for index in _largest_first(sizes)}
    for index, owning in chosen.items():
        holders = [rank for rank, one in enumerate(members) if one.worker_id in held[index]]
        while len(owning) < copies and (able := _candidates(owning, holders, members)):
            owning.append(_least_first(own, able)[0])
            own[owning[-1]] += sizes[index]
    for index, owning in chosen.items():
        while len(owning) < min(copies, len(members)):
            owning.append(_least_first(own, _candidates(owning, range(len(members)), members))[0])
            own[owning[-1]] += sizes[index]
    return tuple(tuple(members[rank].worker_id for rank in sorted(chosen[index])) for index in range(len(sizes)))


def _rebalanced(sizes: Sequence[int], members: Sequence[MemberPlace], table: Owners, limit: float) -> Owners:
    """Move parameters from the member that owns most to those that own least, one by one, as far as it is needed."""
    ranks = {one.worker_id: rank for rank, one in enumerate(members)}
    owning = [[ranks[one] for one in each] for each in table]
    own = [0] * len(members)
    for index, each in enumerate(owning):
        for rank in each:
            own[rank] += sizes[index]
    while True:
        *others, most = _least_first(own, range(len(members)))
        if own[most] <= limit:
            break
        for least in others:
            able = [
                index
                for index, each in enumerate(owning)
                if most in each and 0 < sizes[index] < own[most] - own[least]
                if least in _candidates([rank for rank in each if rank != most], range(len(members)), members)
            ]
            if able:
                break
        else:
            break
        moved = min(able, key=lambda index: (abs(own[most] - own[least] - 2 * sizes[index]), index))
        owning[moved] = [least if rank == most else rank for rank in owning[moved]]
        own[most] -= sizes[moved]
        own[least] += sizes[moved]
    return tuple(tuple(members[rank].worker_id for rank in sorted(each)) for each in owning)


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))


def _candidates(chosen: Sequence[int], able: Iterable[int], members: Sequence[MemberPlace]) -> list[int]:
    """Return those that may own a parameter besides the chosen ones: on other hosts, as long as there are any."""
    used = {members[rank].host for rank in chosen}
    free = [rank for rank in able if rank not in chosen]
    if used >= {one.host for one in members}:
        return free
    return [rank for rank in free if members[rank].host not in used]


def _with_senders(sizes: Sequence[int], table: Owners) -> Owners:
    """Put the sender of each parameter first: the sums of what members send are about the same."""
    sent: dict[str, int] = {}
    found: dict[int, tuple[str, ...]] = {}
    for index in _largest_first(sizes):
        in_order = sorted(table[index])
        first = min(in_order, key=lambda one: sent.get(one, 0))
        sent[first] = sent.get(first, 0) + sizes[index]
        found[index] = (first, *(one for one in in_order if one != first))
    return tuple(found[index] for index in range(len(sizes)))
