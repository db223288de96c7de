"""Strategies: what one iteration of a training loop is, and so how batches become an update.

A training loop (`unisono.script.loop`) goes from boundary to boundary; a **strategy** says what lies between two of
them. `Strategy` is that of a plain ``run.steps``: one global batch, one mean gradient, one update. Another strategy is
a folder of `unisono.strategies` with a class that is derived from it, and the call by which a script chooses it. What a
strategy changes of the bits is in its `Strategy.recipe`, so a run that goes on with another one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from unisono.core.cursor import Cursor, Recipe
from unisono.core.plan import Plan
from unisono.engine.exchange.flat import FlatLayout, Sections
from unisono.engine.loop.step import Iteration, Step
from unisono.engine.microbatch.data import Request
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.members import Members
from unisono.engine.state.buffers import Buffers
from unisono.system.process import Process

__all__ = ["Strategy", "Upcoming"]


class Strategy:
    """What one iteration of a training loop is. Made for one call of ``run.steps``; the loop calls the methods.

    As it is, it is that of a plain ``run.steps``; others override what they do in another way.

    Attributes:
        num_more: iterations after the one with the last global batch, which bring to an end what is under way.
        overlaps: whether parameters stay as they are in an iteration until the members have met, so that a checkpoint
            may copy them meanwhile.
    """

    num_more: int = 0
    overlaps: bool = True
    _context: StepContext

    @property
    def recipe(self) -> Recipe:
        """What it adds to the recipe of the phase; empty where it changes no bit of a plain ``run.steps``."""
        return {}

    def num_done(self, number: int) -> int:
        """Return how many updates of this loop are done before iteration ``number``. Local."""
        return number

    def round_of(self, number: int) -> range | None:
        """Return the global batches of iteration ``number``, where it is a round of several steps; None: it is one."""
        return None

    def sections(self, trained: Sequence[tuple[str, nn.Parameter]], buffers: Buffers) -> Sections | None:
        """Return which parameters and buffers are on this worker; None: all are. Local."""
        return None

    def layout(self, folder: GradientFolder) -> FlatLayout:
        """Return the layout of what the members sum. Local, equal on all members.

        Args:
            folder: of the parameters that are trained now.
        """
        return folder.layout

    def forecast(self, upcoming: Upcoming) -> Iterator[Request]:
        """Yield the micro-batches that this worker will probably compute next, in the order of need. Local.

        Args:
            upcoming: the forecast of a plain ``run.steps``.
        """
        return upcoming()

    def open(self, context: StepContext, first: int) -> None:
        """Get ready, before the first iteration of this worker. Local."""
        self._context = context

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Iteration:
        """Return what the script gets in iteration ``number`` of this loop. Local."""
        return Step(self._context, number, unused=unused, process=process)

    def settle(self) -> None:
        """Bring to an end what other members still need of this one, before they change and before a snapshot.

        Called at a boundary where something happens, before it does. Collective.
        """

    def may_save(self, number: int) -> bool:
        """Return whether a snapshot may be taken before iteration ``number``; the same on all members. Local."""
        return True

    def close(self) -> None:
        """Give back what is held; also after an error. Local."""


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
            plan = self.members.balancing.predicted(self._cursor.position(number).num_leaves)
            yield from self._of(number, turn, plan, self._rehearsed(number, plan) if turn == 0 else ())

    def _of(self, number: int, turn: int, plan: Plan, others: Sequence[int]) -> Iterator[Request]:
        yield from ((number, turn, leaf) for leaf in _leaves(plan, self.members.rank))
        yield from ((number, turn, leaf) for leaf in others)


def _leaves(plan: Plan, rank: int) -> Sequence[int]:
    """Return the leaves of a rank, which may be of the generation after that of the plan: then there are none."""
    return plan.ranges[rank] if rank < len(plan.ranges) else ()
