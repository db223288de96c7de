"""Forecast of the micro-batches that a worker computes next, for its loader processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unisono.decisions.cursor import Cursor
from unisono.decisions.plan import Plan
from unisono.rounds.members import Members

__all__ = ["Upcoming"]


class Upcoming:
    """The micro-batches that this worker will probably compute next, for loader processes. Local.

    Args:
        rehearsed: (step, its plan) -> the micro-batch of another member that this one computes as well, if any.
    """

    def __init__(
        self, members: Members, cursor: Cursor, num_steps: int, rehearsed: Callable[[int, Plan], int | None]
    ) -> None:
        self._members = members
        self._cursor = cursor
        self._num_steps = num_steps
        self._rehearsed = rehearsed
        self._number = -1
        self._plan: Plan | None = None
        self._other: int | None = None

    def note(self, number: int, plan: Plan, other: int | None) -> None:
        """Note the plan of the step under way, and the other member's micro-batch that is computed as well."""
        self._number, self._plan, self._other = number, plan, other

    def __call__(self) -> Iterator[tuple[int, int]]:
        """Yield (step, micro-batch) in the order of need."""
        rank = self._members.rank
        if self._plan is not None:
            yield from ((self._number, leaf) for leaf in _of(self._plan, rank))
            if self._other is not None:
                yield self._number, self._other
        for number in range(self._number + 1, self._num_steps):
            plan = self._members.predicted(self._cursor.position(number).num_leaves)
            yield from ((number, leaf) for leaf in _of(plan, rank))
            other = self._rehearsed(number, plan)
            if other is not None:
                yield number, other


def _of(plan: Plan, rank: int) -> Sequence[int]:
    """Return the leaves of a rank, which may be of the generation after that of the plan: then there are none."""
    return plan.ranges[rank] if rank < len(plan.ranges) else ()
