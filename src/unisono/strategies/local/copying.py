"""The states of replicas on their way between members: as copies, and to those that stay when others leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from unisono.core.holdings import Holders, copied, handed_over, holders_of
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.moving import MovingRound, move
from unisono.strategies.local.replica_states import Replicas, Shelf

__all__ = ["LeavingRound", "copy_states"]


def copy_states(members: Members, shelf: Shelf, num_copies: int) -> None:
    """Bring each state to as many members as are to hold it, and note who does. Collective."""
    payloads = members.gather(msgspec.msgpack.encode(shelf.here()))
    now = holders_of([msgspec.msgpack.decode(payload, type=list[int]) for payload in payloads])
    wanted = copied(now, members.hosts, num_copies)
    move(members, shelf, now, wanted)
    shelf.holders = _by_id(members, wanted)


class LeavingRound(MovingRound):
    """Members that stay get the states that they would lack, with as many copies as the run wants.

    Args:
        replicas: at a boundary.
        num_copies: how many members keep the state of each replica.
    """

    def __init__(self, members: Members, replicas: Replicas, num_copies: int, clock: Clock) -> None:
        title = "the states of replicas moving to the workers that stay"
        super().__init__(members, replicas.now, title, clock)
        self._shelf = replicas.now
        self._num_copies = num_copies

    def choose(self, now: Holders, staying: Sequence[int]) -> Mapping[int, tuple[str, ...]]:
        return _by_id(self._members, handed_over(now, staying, self._num_copies))

    def finish(self) -> None:
        self._shelf.holders = self.wanted


def _by_id(members: Members, holders: Holders) -> dict[int, tuple[str, ...]]:
    return {replica: tuple(members.worker_ids[rank] for rank in ranks) for replica, ranks in holders.items()}
