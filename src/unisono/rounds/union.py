"""Round in which each member brings named values, and all members end with the same union of them.

A member that has seen the commit gives the union to those that repeat the round without a member that was lost. So a
decision that follows from the values is the same on all members, also where it follows from those of the lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from unisono.decisions.plan import Plan
from unisono.rounds.life import CHECKPOINT, Rounds
from unisono.rounds.members import Gathered, Members, Undivided

__all__ = ["union"]


class _Brought(msgspec.Struct, frozen=True):
    """What a member brings."""

    values: dict[str, bytes]
    is_final: bool = False
    """The member has finished the round: this is the union."""


class _Union(Undivided):
    """Work of all members, each of which brings the values that it has made.

    Args:
        work: called on all members, perhaps more than once: again when a member was lost.
    """

    title: Final = "a checkpoint or the end of the run"

    def __init__(
        self,
        members: Members,
        work: Callable[[], Mapping[str, bytes]],
        trade: Callable[[], Mapping[str, bytes]],
        generation: int | None,
        kind: str,
    ) -> None:
        super().__init__(members)
        self.kind = kind
        self._work = work
        self._trade = trade
        self._generation = generation
        self.values: dict[str, bytes] = {}
        """Of all members, once the round is over."""

    def compute(self, plan: Plan) -> Iterator[object]:
        with self._members.waiting():
            self.values = {**self._work(), **self.values}
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        if self._members.team.generation == self._generation:
            with self._members.waiting():
                self.values = {**self._trade(), **self.values}
        payloads = self._members.gather(msgspec.msgpack.encode(_Brought(self.values)))
        found: dict[str, bytes] = {}
        for brought in (msgspec.msgpack.decode(payload, type=_Brought) for payload in payloads):
            if brought.is_final:
                found = brought.values
                break
            found |= brought.values
        self.values = dict(sorted(found.items()))
        return Gathered(self._members, msgspec.msgpack.encode(_Brought(self.values, is_final=True)))


def union(
    rounds: Rounds,
    work: Callable[[], Mapping[str, bytes]] = dict,
    *,
    trade: Callable[[], Mapping[str, bytes]] = dict,
    generation: int | None = None,
    kind: str = CHECKPOINT,
) -> dict[str, bytes]:
    """Return the values that all members bring, by name, the same on all of them. Collective.

    Args:
        work: returns those of this member; names of different members differ. Called again when a member was lost
            meanwhile: what it has returned for a name before stays as it was.
        trade: returns more of them, and may use the exchange: collective, and called on all members or on none.
        generation: the one in which ``trade`` is called, equal on all members. None, or when a member was lost
            meanwhile: it is not called.
        kind: of the round.
    """
    round_ = _Union(rounds.members, work, trade, generation, kind)
    for _ in rounds.play(round_):
        pass
    return round_.values
