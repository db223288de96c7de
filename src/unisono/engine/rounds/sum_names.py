"""The sums of a step whose names are new: the round that makes the names known to all members.

A sum of ``step.add`` travels in the tail of the slot, for which its name and shape must be known before the step. In
the step that brings a new name, each member keeps the values of its own micro-batches, and after the commit of the
gradients the members exchange these. The values of a member that is lost in between are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from torch import Tensor

from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.tree import Node, leaf
from unisono.engine.rounds.members import Gathered, Members
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.sums import Sums, Total
from unisono.system.faults import point

__all__ = ["SumsRound"]

Values = dict[str, Tensor]


class SumsRound:
    """The sums of a step, by micro-batch.

    Args:
        have: by leaf, the values of the micro-batches that this member has computed in the step.
        compute_again: yields a micro-batch to the script, and puts its values into ``have``.

    Attributes:
        totals: of the step, by name, once the round is over.
    """

    kind: Final = "sums"
    title: Final = "the sums of a step"

    def __init__(
        self,
        members: Members,
        sums: Sums,
        num_leaves: int,
        have: dict[int, Values],
        compute_again: Callable[[int], Iterator[object]],
    ) -> None:
        self.num_leaves = num_leaves
        self.totals: dict[str, Total] = {}
        self._members = members
        self._sums = sums
        self._have = have
        self._compute_again = compute_again
        self._is_first = False

    def first_plan(self) -> Plan:
        self._is_first = True  # together the members have the values of all micro-batches
        return even_plan(self._members.size, self.num_leaves)

    def begin(self, plan: Plan) -> None:
        pass

    def compute(self, plan: Plan) -> Iterator[object]:
        todo = () if self._is_first else plan.ranges[self._members.rank]
        for index in todo:
            if index not in self._have:
                yield from self._compute_again(index)
        point("in_sums")

    def combine(self, plan: Plan) -> Gathered:
        for payload in self._members.gather(to_bytes(self._have)):
            self._have.update(from_bytes(payload))
        return Gathered(self._members, to_bytes(self._have))

    def interrupt(self) -> Collection[Node]:
        self._is_first = False
        return [leaf(index, self.num_leaves) for index in self._have]

    def finish(self) -> None:
        self.totals = self._sums.learn({index: self._have[index] for index in range(self.num_leaves)})
