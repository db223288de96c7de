"""Holdings: which members hold a unit of the state that not all members hold, and how it comes to others.

A **unit** moves as a whole: the state of a parameter of a sharded optimizer (momentum, second moments), that of a
replica of local steps, or a tensor of a checkpoint that is loaded. What is wanted differs:
`unisono.core.ownership.owners` cuts an optimizer over the members; `computed`, `copied` and `handed_over` say who is to
have the states of replicas. `moves` follows from that for all of them.
Decisions without I/O: every member decides the same from who holds what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Holders", "Move", "computed", "copied", "handed_over", "holders_of", "keepers", "moves"]

Holders = Mapping[int, Sequence[int]]
"""By unit, the ranks of the members that hold it, ascending."""


class Move(NamedTuple):
    """A unit that goes from one member to others."""

    unit: int
    source: int
    """Rank."""
    targets: tuple[int, ...]
    """Ranks, ascending; none of them holds the unit."""


def holders_of(held: Sequence[Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Return who holds each unit, from the units that each rank holds."""
    units = sorted({unit for each in held for unit in each})
    return {unit: tuple(rank for rank, each in enumerate(held) if unit in each) for unit in units}


def moves(now: Holders, wanted: Holders, size_of: Callable[[int], int]) -> list[Move]:
    """Return how units come to the members that are to hold them and do not.

    Each comes from the holder that has the least to send so far.

    Args:
        now: who holds each unit; of one that nobody holds there is nothing to send.
        size_of: returns the bytes of a unit.
    """
    sent: Counter[int] = Counter()
    found = []
    for unit, ranks in sorted(wanted.items()):
        having = now.get(unit, ())
        targets = tuple(rank for rank in sorted(ranks) if rank not in having)
        if targets and having:
            source = min(having, key=lambda rank: (sent[rank], rank))
            sent[source] += size_of(unit)
            found.append(Move(unit, source, targets))
    return found


# -- the states of replicas --------------------------------------------------------------------------


def computed(now: Holders, needs: Sequence[Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Return who is to hold the state of each replica so that all can be computed: also those that compute it.

    Args:
        now: each replica has at least one holder.
        needs: by rank, the replicas that the member is to compute, alone or with others.
    """
    return {
        replica: tuple(rank for rank, each in enumerate(needs) if rank in having or replica in each)
        for replica, having in now.items()
    }


def keepers(holders: Holders, groups: Mapping[int, Sequence[int]], num_copies: int) -> dict[int, tuple[int, ...]]:
    """Return by replica which members of its group keep its state while they compute it: the others use theirs up.

    So many that, with the members that hold it and do not compute it, ``num_copies`` have it until the round is over.

    Args:
        groups: by replica, the ranks of the members that compute it together.
    """
    found = {}
    for replica, group in groups.items():
        elsewhere = sum(rank not in group for rank in holders[replica])
        found[replica] = tuple(group[: max(0, num_copies - elsewhere)])
    return found


def copied(now: Holders, hosts: Sequence[str], num_copies: int) -> dict[int, tuple[int, ...]]:
    """Return who is to hold the state of each replica so that ``num_copies`` members do, on different hosts where there
    are several.

    Of the members that may get a copy, those with the fewest states get it.

    Args:
        now: each replica has at least one holder.
        hosts: by rank.
    """
    loads = [sum(rank in having for having in now.values()) for rank in range(len(hosts))]
    wanted = {}
    for replica in sorted(now):
        having = list(now[replica])
        while len(having) < len(hosts):
            used = {hosts[rank] for rank in having}
            is_spread = len(used) >= min(num_copies, len(set(hosts)))
            if len(having) >= num_copies and is_spread:
                break
            free = [rank for rank in range(len(hosts)) if rank not in having]
            elsewhere = [rank for rank in free if hosts[rank] not in used]
            if len(having) >= num_copies and not elsewhere:
                break
            chosen = min(elsewhere or free, key=lambda rank: (loads[rank], rank))
            loads[chosen] += 1
            having.append(chosen)
        wanted[replica] = tuple(sorted(having))
    return wanted


def handed_over(now: Holders, staying: Sequence[int], num_copies: int) -> dict[int, tuple[int, ...]]:
    """Return who is to hold the state of each replica before members leave: those that do, and some that stay.

    Of the members that may get one, those with the fewest states get it.

    Args:
        now: each replica has at least one holder.
        staying: the ranks of the members that stay, ascending.
    """
    loads = {rank: sum(rank in having for having in now.values()) for rank in staying}
    wanted = {}
    for replica, having in sorted(now.items()):
        lacking = sorted((rank for rank in staying if rank not in having), key=lambda rank: (loads[rank], rank))
        targets = lacking[: max(0, num_copies - sum(rank in having for rank in staying))]
        for rank in targets:
            loads[rank] += 1
        wanted[replica] = tuple(sorted((*having, *targets)))
    return wanted
