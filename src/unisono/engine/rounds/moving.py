"""Parts of the state that not all members hold, on their way between members.

`move` brings units of such a part to members that lack them. `MovingRound` is the round that only does this, because
members leave, were lost or have come. It ends with an exchange in which each member says that it has all that it gets.
A member that has passed it needs no other member for this round any more: it may drop what others hold now, leave, or
begin the next round; to members that have not passed it, it says so (`Letter.is_final`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from unisono.core.holdings import Holders, Move, holders_of, moves
from unisono.core.plan import Plan
from unisono.core.tree import Node
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.life import MOVING
from unisono.engine.rounds.members import Gathered, Members, Undivided
from unisono.engine.state.packing import pack_held
from unisono.system.faults import point

__all__ = ["HeldUnits", "MovingRound", "move"]


class HeldUnits(Protocol):
    """The units of a state of which this member holds some, by their numbers: e.g. the states of parameters.

    A state of a unit is a tree of dicts, lists, tensors and plain values; the tree is the same on all members.
    """

    def here(self) -> Collection[int]:
        """Return the units that this member holds."""

    def state(self, unit: int) -> Any:
        """Return the state of a unit that this member holds."""

    def made(self, unit: int) -> Any:
        """Return the state of a unit with tensors of arbitrary content, to be filled."""

    def placeholder(self, unit: int) -> Any:
        """Return the state of a unit with meta tensors."""

    def put(self, unit: int, state: Any) -> None:
        """Hold a unit from now on."""


def move(members: Members, holding: HeldUnits, now: Holders, wanted: Holders) -> None:
    """Bring units to members that are to hold them and do not. Collective.

    Args:
        now: who holds each unit; equal on all members, as ``wanted`` is.

    Raises:
        PeerLost, DeadlineExceeded: a member was lost; no unit has come.
    """

    def num_bytes(unit: int) -> int:
        return sum(tensor.nbytes for tensor in pack_held(holding.placeholder(unit)).tensors)

    def state_of(one: Move) -> Any:
        if members.rank == one.source:
            return holding.state(one.unit)
        return holding.made(one.unit) if members.rank in one.targets else holding.placeholder(one.unit)

    planned = moves(now, wanted, num_bytes)
    if not planned:
        return
    point("states.delivering")
    states = {one: state_of(one) for one in planned}
    members.deliver(
        [Parcel(one.source, one.targets, tensor) for one in planned for tensor in pack_held(states[one]).tensors]
    )
    for one in planned:
        if members.rank in one.targets:
            holding.put(one.unit, states[one])


class _Held(msgspec.Struct, frozen=True):
    """What a member says before units move."""

    units: list[int] = []
    departs: bool = False
    """It leaves at the next boundary."""


class MovingRound(Undivided, ABC):
    """Units move to the members that are to hold them. Other rounds override `choose` and `finish`.

    Args:
        title: equal on all members.

    Attributes:
        wanted: by unit, the ids of the workers that hold it from now on. Once the round is over; equal on all members.
    """

    kind: Final = MOVING

    def __init__(self, members: Members, holding: HeldUnits, title: str, clock: Clock) -> None:
        super().__init__(members)
        self.title = title
        self.wanted: dict[int, tuple[str, ...]] = {}
        self._holding = holding
        self._clock = clock

    @abstractmethod
    def choose(self, now: Holders, staying: Sequence[int]) -> Mapping[int, tuple[str, ...]]:
        """Return by unit the ids of the workers that are to hold it; equal on all members. Local.

        Args:
            now: who holds each unit.
            staying: the ranks of the members that stay; all, if none does.

        Raises:
            StateLost: nobody holds some unit.
        """

    def compute(self, plan: Plan) -> Iterator[object]:
        point("states.moving")
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        self._clock.switch("exchange")
        members, ids = self._members, self._members.worker_ids
        own = _Held(sorted(self._holding.here()), ids[members.rank] in members.departing())
        letters = members.letters(msgspec.msgpack.encode(own))
        said = next((letter.payload for letter in letters if letter.is_final), None)
        if said is None:
            heard = [msgspec.msgpack.decode(letter.payload, type=_Held) for letter in letters]
            now = holders_of([one.units for one in heard])
            staying = [rank for rank, one in enumerate(heard) if not one.departs]
            wanted = self.choose(now, staying or range(members.size))
            move(members, self._holding, now, {unit: [ids.index(one) for one in each] for unit, each in wanted.items()})
            point("states.moved")
            members.gather(b"")
            said = msgspec.msgpack.encode(wanted)
        self.wanted = msgspec.msgpack.decode(said, type=dict[int, tuple[str, ...]])
        return Gathered(members, said)

    def interrupt(self) -> Collection[Node]:
        self._clock.switch("waiting")
        return super().interrupt()
