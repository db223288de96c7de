"""The states of replicas on their way from members that leave to those that stay, before they go.

The round ends with an exchange in which each member says that it has all that it gets. Whoever has passed it needs
nobody any more, and may leave, or begin the next round; to those that have not, it says so (`Letter.is_final`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from unisono.core.copies import handed_over, holders_after
from unisono.core.plan import Plan
from unisono.engine.rounds.life import MOVING
from unisono.engine.rounds.members import Gathered, Members, Undivided
from unisono.strategies.local.copying import by_replica, deliver
from unisono.strategies.local.replica_states import Replicas
from unisono.system.faults import point

__all__ = ["LeavingRound"]


class _Offer(msgspec.Struct, frozen=True):
    """What a member says before states move."""

    held: list[int] = []
    """The replicas whose states it has."""
    departs: bool = False


class LeavingRound(Undivided):
    """Members that stay get the states that they would lack, with as many copies as the run wants.

    Args:
        replicas: at a boundary.
        num_copies: how many members keep the state of each replica.
    """

    kind: Final = MOVING
    title: Final = "the states of replicas moving to the workers that stay"

    def __init__(self, members: Members, replicas: Replicas, num_copies: int) -> None:
        super().__init__(members)
        self._replicas = replicas
        self._num_copies = num_copies

    def compute(self, plan: Plan) -> Iterator[object]:
        point("local.leaving")
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        members, shelf = self._members, self._replicas.now
        departs = members.worker_ids[members.rank] in members.departing()
        own = _Offer(sorted(shelf.held), departs)
        letters = members.letters(msgspec.msgpack.encode(own))
        if not any(letter.is_final for letter in letters):
            offers = [msgspec.msgpack.decode(letter.payload, type=_Offer) for letter in letters]
            holders = by_replica([offer.held for offer in offers])
            staying = [rank for rank, offer in enumerate(offers) if not offer.departs]
            moves = handed_over(holders, staying, self._num_copies)
            shelf.held.update(deliver(members, shelf, moves))
            ids = members.worker_ids
            after = holders_after(holders, moves)
            shelf.holders = {replica: tuple(ids[rank] for rank in ranks) for replica, ranks in after.items()}
            members.gather(b"")
        return Gathered(members, b"")
