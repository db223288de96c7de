"""Forecast of the micro-batches that a worker computes next, for its loader processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unisono.core.cursor import Cursor
from unisono.core.plan import Plan
from unisono.engine.microbatch.data import Request
from unisono.engine.rounds.members import Members

__all__ = ["Upcoming"]


class Upcoming:
    """The micro-batches that this worker will probably compute next, for loader processes. Local.

    A step has as many passes over its global batch as the one before.

    Attributes:
        members: whose plans are predicted.

    Args:
        rehearsed: (step, its plan) -> the micro-batches that this member computes as well, to compare them: of another
            member, or one of its own for the second time.
    """

    def __init__(
        self, members: Members, cursor: Cursor, num_steps: int, rehearsed: Callable[[int, Plan], Sequence[int]]
    ) -> None:
        self.members = members
        self._cursor = cursor
        self._num_steps = num_steps
        self._rehearsed = rehearsed
        self._number = -1
        self._turn = 0
        self._num_turns = 1  # of the last step that is over
        self._plan: Plan | None = None
        self._others: Sequence[int] = ()

    def note(self, number: int, plan: Plan, others: Sequence[int], turn: int = 0) -> None:
        """Note the plan of the pass under way, and the micro-batches that are computed as well, to compare them.

        Args:
            turn: the pass over the global batch of step ``number``.
        """
        if number != self._number and self._number >= 0:
            self._num_turns = self._turn + 1
        self._number, self._turn, self._plan, self._others = number, turn, plan, others

    def __call__(self) -> Iterator[Request]:
        """Yield (step, turn, micro-batch) in the order of need."""
        if self._plan is not None:
            yield from self._of(self._number, self._turn, self._plan, self._others)
            yield from self._turns(self._number, range(self._turn + 1, self._num_turns))
        for number in range(self._number + 1, self._num_steps):
            yield from self._turns(number, range(self._num_turns))

    def _turns(self, number: int, turns: range) -> Iterator[Request]:
        """Yield the requests of whole passes that have not begun."""
        for turn in turns:
            plan = self.members.predicted(self._cursor.position(number).num_leaves)
            yield from self._of(number, turn, plan, self._rehearsed(number, plan) if turn == 0 else ())

    def _of(self, number: int, turn: int, plan: Plan, others: Sequence[int]) -> Iterator[Request]:
        yield from ((number, turn, leaf) for leaf in _leaves(plan, self.members.rank))
        yield from ((number, turn, leaf) for leaf in others)


def _leaves(plan: Plan, rank: int) -> Sequence[int]:
    """Return the leaves of a rank, which may be of the generation after that of the plan: then there are none."""
    return plan.ranges[rank] if rank < len(plan.ranges) else ()
