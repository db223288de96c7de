"""What the members of a run say to each other between two steps: barriers, values, the order of a block of the script.

The result of such a call is what one gather of the members' payloads gives. A member that has committed sends the
complete result to those that have not, so all members go on with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import msgspec
import torch.distributed as dist

from unisono.decisions.plan import Plan
from unisono.decisions.tree import Node, leaf
from unisono.exchange.flat import FlatLayout
from unisono.exchange.groups import ScriptGroup
from unisono.faults import point
from unisono.rounds.life import Rounds
from unisono.rounds.members import Members, Undivided

__all__ = ["BlockRound", "GroupRound", "TalkRound"]


class _Letter(msgspec.Struct, frozen=True):
    """Payload of one member."""

    value: bytes
    result: list[bytes] | None = None
    """The values of all members, by rank, from a member that has committed."""


class TalkRound(Undivided):
    """One call of ``run.barrier``, ``run.broadcast`` or ``run.gather``: each member sends a value, all get all values.

    Args:
        title: of the call, equal on all members.
        value: returns the value of this member; called again after a loss, when the member may have another rank.
    """

    kind = "talk"

    def __init__(self, rounds: Rounds, title: str, value: Callable[[], bytes] = bytes) -> None:
        super().__init__(rounds.members)
        self.title = title
        self.values: list[bytes] = []
        """Of all members, by rank, once the round is over."""
        self._value = value

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        yield from ()

    def combine(self, plan: Plan) -> Said:
        self.values = _gather(self._members, _Letter(self._value()))
        return Said(self._members, _Letter(b"", self.values))

    def finish(self) -> None:
        point("talked")


class BlockRound(TalkRound):
    """A block of the script that one member runs before the others; if that member is lost meanwhile, the next one.

    `compute` yields once on the member whose turn it is, and goes on when the member has run its block.
    """

    def __init__(self, rounds: Rounds, title: str) -> None:
        super().__init__(rounds, title)
        self._has_run = False

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        if plan.ranges[self._members.rank] and not self._has_run:
            yield None
            self._has_run = True

    def interrupt(self) -> Collection[Node]:
        return [leaf(0, self.num_leaves)] if self._has_run else []


class GroupRound(TalkRound):
    """Connects the members of the current generation by a group of ``torch.distributed``.

    All members get the group of the same generation. If a member is lost before this one has its group, and another
    member has got it, this one gets a group that is over: so the collectives raise on all of them, and all call again.
    """

    def __init__(self, rounds: Rounds, title: str) -> None:
        team = rounds.team
        super().__init__(rounds, title, lambda: team.generation.to_bytes(8, "little"))
        self.group: dist.ProcessGroup | None = None
        self._team = team

    def combine(self, plan: Plan) -> Said:
        said = super().combine(plan)
        if int.from_bytes(self.values[0], "little") == self._team.generation:
            with self._team.waiting():
                self.group = self._team.process_group()
        else:
            self.group = ScriptGroup(self._team.rank, self._team.size)
        return said


class Said:
    """Result of a call, which slower members still need."""

    layout: FlatLayout | None = None

    def __init__(self, members: Members, letter: _Letter) -> None:
        self.letter = letter
        self._members = members

    def stand_by(self, plan: Plan) -> None:
        """Send the slower members the complete result, which they take as it is."""
        _gather(self._members, self.letter)


def _gather(members: Members, own: _Letter) -> list[bytes]:
    """Return the values of all members, by rank: the complete result of a member that has it, if there is one.

    Raises:
        StepError: the members are at different calls.
    """
    payloads = members.gather(msgspec.msgpack.encode(own))
    letters = [msgspec.msgpack.decode(payload, type=_Letter) for payload in payloads]
    for letter in letters:
        if letter.result is not None:
            return letter.result
    return [letter.value for letter in letters]
