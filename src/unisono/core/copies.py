"""Copies of the replicas' states: who sends which state to whom. Decisions without I/O.

A replica's state (momentum, second moments) lies on the worker that has computed the replica, and on others that keep a
copy in case that worker is lost. Every member decides the same from who holds what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Move", "copies", "deliveries", "handed_over", "holders_after", "keepers"]


@dataclass(frozen=True)
class Move:
    """A state that goes from one member to others."""

    replica: int
    source: int
    """Rank."""
    targets: tuple[int, ...]
    """Ranks, ascending; none of them has the state."""


def deliveries(holders: Mapping[int, Sequence[int]], needs: Sequence[Sequence[int]]) -> list[Move]:
    """Return how each member gets the states of the replicas that it is to compute.

    Args:
        holders: by replica, the ranks that have its state, ascending; each replica has at least one.
        needs: by rank, the replicas that the member is to compute, alone or with others.
    """
    targets: dict[int, list[int]] = {}
    for rank, replicas in enumerate(needs):
        for replica in replicas:
            if rank not in holders[replica]:
                targets.setdefault(replica, []).append(rank)
    return [Move(replica, holders[replica][0], tuple(ranks)) for replica, ranks in sorted(targets.items())]


def keepers(
    holders: Mapping[int, Sequence[int]], groups: Mapping[int, Sequence[int]], num_copies: int
) -> dict[int, tuple[int, ...]]:
    """Return by replica which members of its group keep its state while they compute it: the others use theirs up.

    So many that, with the members that hold it and do not compute it, ``num_copies`` have it until the round is over.

    Args:
        holders: by replica, the ranks that have its state, ascending.
        groups: by replica, the ranks of the members that compute it together.
    """
    found = {}
    for replica, group in groups.items():
        elsewhere = sum(rank not in group for rank in holders[replica])
        found[replica] = tuple(group[: max(0, num_copies - elsewhere)])
    return found


def copies(holders: Mapping[int, Sequence[int]], hosts: Sequence[str], num_copies: int) -> list[Move]:
    """Return how each replica's state comes to ``num_copies`` members, on different hosts where there are several.

    Of the members that may get a copy, those with the fewest states get it.

    Args:
        holders: by replica, the ranks that have its state, ascending; each replica has at least one.
        hosts: by rank.
    """
    loads = [sum(rank in having for having in holders.values()) for rank in range(len(hosts))]
    moves = []
    for replica in sorted(holders):
        having = list(holders[replica])
        targets: list[int] = []
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
            targets.append(chosen)
        if targets:
            moves.append(Move(replica, holders[replica][0], tuple(sorted(targets))))
    return moves


def handed_over(holders: Mapping[int, Sequence[int]], staying: Sequence[int], num_copies: int) -> list[Move]:
    """Return how states come to members that stay, before the others leave.

    Of the members that may get one, those with the fewest states get it.

    Args:
        holders: by replica, the ranks that have its state, ascending; each replica has at least one.
        staying: the ranks of the members that stay, ascending.
    """
    loads = {rank: sum(rank in having for having in holders.values()) for rank in staying}
    moves = []
    for replica, having in sorted(holders.items()):
        lacking = sorted((rank for rank in staying if rank not in having), key=lambda rank: (loads[rank], rank))
        targets = lacking[: max(0, num_copies - sum(rank in having for rank in staying))]
        for rank in targets:
            loads[rank] += 1
        if targets:
            moves.append(Move(replica, having[0], tuple(sorted(targets))))
    return moves


def holders_after(holders: Mapping[int, Sequence[int]], moves: Sequence[Move]) -> dict[int, tuple[int, ...]]:
    """Return who has each replica's state after these moves."""
    found = {replica: set(having) for replica, having in holders.items()}
    for move in moves:
        found[move.replica] |= set(move.targets)
    return {replica: tuple(sorted(having)) for replica, having in sorted(found.items())}
