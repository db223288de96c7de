"""Sums under way while the script goes on: what steps with a delay and rounds with a delay do alike.

`unisono.rounds.pipeline` says how such a training goes through a loss, and has the steps of ``run.steps(delay=D)``;
`unisono.rounds.overlapped` has the rounds of ``run.local_steps(delay=1)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from unisono.decisions.plan import Plan
from unisono.decisions.tree import Node
from unisono.errors import RunStopped
from unisono.exchange import Combined, Share
from unisono.exchange.flat import FlatLayout, Slot
from unisono.faults import point
from unisono.rounds.arrived import Arrived, Committed, give
from unisono.rounds.gradient import StepContext
from unisono.rounds.members import Summed
from unisono.rounds.spare import Spare
from unisono.rounds.standing import plan_of
from unisono.rounds.team import LOST
from unisono.rounds.underway import UnderWay

__all__ = ["SumsAhead"]


class Interruptible(Protocol):
    """A step, or a round, whose sum is under way."""

    title: str

    @property
    def num_leaves(self) -> int:
        """Of all members."""

    @property
    def num_computed(self) -> int:
        """Leaves that this member has computed."""

    def interrupt(self) -> Collection[Node]:
        """Give up the plan, because a member was lost. Local."""


R = TypeVar("R", bound=Interruptible)


class SumsAhead(ABC, Generic[R]):
    """The steps of one training loop: those that are computed, under way, and committed but not applied.

    It is the `unisono.rounds.Ahead` of the run. Below, a step is also a round of local steps.

    Args:
        delay: so many iterations after its own the sum of a step is applied.
        num_steps: of the loop.
        first: iteration in which this member begins.

    Attributes:
        num_computed: leaves that this member has computed in the newest iteration.
        news: why the newest plan differs from the one before; "" where it does not.
    """

    def __init__(self, context: StepContext, delay: int, num_steps: int, first: int, device: torch.device) -> None:
        self._context = context
        self._delay = delay
        self._rounds = context.rounds
        self._members = context.rounds.members
        self._device = device
        self._open: dict[int, R | None] = {}
        """The steps that are begun and not committed, in their order; None: this member has computed nothing of it."""
        self._first = min(first, num_steps)  # without a commit
        self._computing: int | None = None
        self._playing: int | None = None
        self._resumes_at: int | None = None  # the iteration in which this member computes what is missing
        self._held: list[dict[int, Sequence[tuple[int, int]]]] = []
        self._is_left = False
        # Others may have met this member after a loss already, and compute nothing ahead.
        self._is_recovering = not self._rounds.is_level
        self._has_reported = False
        self.num_computed = 0
        self.news = ""
        self._under_way = UnderWay(self._members, device)
        self._spare = Spare(device)

    def _take_over(self) -> None:
        """Be the `Ahead` of the run from now on. Local."""
        self.met([report.ahead for report in self._rounds.reports()])
        self._rounds.ahead = self
        self._members.drain = self.drain

    # -- of the kind of steps ------------------------------------------------------------------------

    @abstractmethod
    def _arrived_sums(self) -> Iterable[Arrived]:
        """Return the sums that are committed, and not applied. Local."""

    @abstractmethod
    def _has_arrived(self, number: int) -> bool:
        """Return whether the sum of a step is committed, and not applied. Local."""

    @abstractmethod
    def _take_given(self, number: int, summed: Summed) -> Arrived:
        """Take a sum that another member has committed. Local."""

    @abstractmethod
    def _num_leaves(self) -> int:
        """Return the number of leaves of the first step without a commit. Local."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget what only the script needs, because it has left the loop. Local."""

    @abstractmethod
    def redo(self) -> None:
        """Forget the sums that are committed and not applied: they are made again. Local."""

    @abstractmethod
    def note(self, round_: R, combined: Combined, share: Share | None) -> Committed:
        """Take the committed sum of a step; returns what is kept of it for members that have not seen the commit."""

    @abstractmethod
    def finish(self, number: int) -> None:
        """Note that a step is committed."""

    # -- commits -------------------------------------------------------------------------------------

    def _set_aside(self, number: int, round_: R, plan: Plan) -> Share:
        """Put the nodes of a step that is computed aside; returns this member's share of its sum. Local."""
        self._has_reported, self.num_computed = True, round_.num_computed
        slots = self._members.slots
        slots.ahead[number], slots.nodes = slots.nodes, {}
        self._computing = None
        return Share(round_.num_leaves, plan.nodes, dict(slots.ahead[number]))

    def _wait_for(self, number: int) -> None:
        """Wait for the commit of a step, or meet the survivors of a loss. Collective."""
        self._context.clock.switch("exchange")
        title = round_.title if (round_ := self._open.get(number)) is not None else ""
        try:
            with self._members.waiting():
                while not self._has_arrived(number) and self._under_way:
                    self._rounds.note_round(self._rounds.number, title)
                    self._commit_next()
        except LOST as lost:
            self._rounds.regroup(lost)
        finally:
            self._rounds.note_round(-1, "")
        self._context.clock.switch("other")

    def _commit_next(self) -> None:
        number, combined, share = self._under_way.next()
        for slot in self._members.slots.ahead.pop(number).values():
            self._members.release(slot)
        round_ = self._open[number]
        assert round_ is not None
        self._rounds.commit(self.note(round_, combined, share))
        self.finish(number)
        point("committed")

    # -- after a loss --------------------------------------------------------------------------------

    def plan_of(self, number: int, num_leaves: int) -> Plan:
        """Return the plan of what is missing of a step, by what all members have reported after the loss."""
        held = [each.get(number, ()) for each in self._held]
        return plan_of(held, [True] * len(held), num_leaves)

    # -- for the life of the rounds ------------------------------------------------------------------

    @property
    def holds_back(self) -> bool:
        return self._is_recovering and not self._is_left

    def drain(self) -> None:
        while self._under_way:
            self._commit_next()

    def interrupt(self) -> None:
        slots = self._members.slots
        if self._computing is not None:
            number, self._computing = self._computing, None
            round_ = self._open[number]
            assert round_ is not None
            round_.interrupt()
            slots.ahead[number], slots.nodes = slots.nodes, {}
        self._under_way.stop()
        while self._under_way.has_done:
            self._commit_next()
        self._under_way.clear()
        self._is_recovering = True
        if self._is_left:
            self._drop()

    def sends(self) -> bool:
        return isinstance(self._rounds.finished, Committed)

    def give(self, source: int, *, behind: bool) -> None:
        summed = give(self._members, source, self._rounds.finished, self.new_slot)
        if not behind:
            return
        number = self._first
        arrived = self._take_given(number, summed)
        slots = self._members.slots
        for node in (slots.nodes if number == self._playing else slots.ahead.pop(number, {})).values():
            self._members.release(node)
        self._rounds.commit(Committed(summed.slot.layout, arrived))
        self.finish(number)

    def report(self) -> tuple[int, int, list[tuple[int, list[Node]]]]:
        slots = self._members.slots
        at = self._first + self._delay * (self._first > 0) if self._resumes_at is None else self._resumes_at
        held = [
            (number, list(slots.nodes if number == self._playing else slots.ahead.get(number, {})))
            for number in self._open
        ]
        return at, self._num_leaves(), held

    def met(self, held: Sequence[Sequence[tuple[int, Sequence[tuple[int, int]]]]]) -> None:
        self._held = [dict(each) for each in held]

    # -- between two iterations ----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all sums under way, because the members change or a checkpoint is taken. Collective."""
        self._rounds.drain()
        for arrived in self._arrived_sums():
            arrived.is_stale = True  # it was said before what happens at this boundary

    def leave(self) -> None:
        """Note that the script has left the loop. Local; sums under way are waited for when something else follows."""
        self._is_left = True
        self._forget()
        self._spare.clear()
        if not self._under_way:
            self._drop()
        self._under_way.end()

    def abandon(self) -> None:
        """Stop what is under way, because the run ends in this process. Local."""
        if self._under_way:
            self._members.exchange.interrupt(RunStopped("the run has ended in this process"))
            self._under_way.stop()
        self._under_way.clear()

    def _drop(self) -> None:
        for nodes in self._members.slots.ahead.values():
            for slot in nodes.values():
                self._members.release(slot)
        self._members.slots.ahead.clear()
        self._open.clear()

    # -- memory --------------------------------------------------------------------------------------

    def new_slot(self, layout: FlatLayout) -> Slot:
        """Return a slot for the sum of a step, in memory of this member's own. Local."""
        return self._spare.new_slot(layout)
