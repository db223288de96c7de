"""The sum of one step whose gradient is applied later. `unisono.strategies.delay.pipeline` says when, and what a loss
does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

import msgspec
from torch import Tensor

from unisono.core.plan import Plan
from unisono.core.words import NAMES_THE_LINE
from unisono.engine.exchange import Share, combine
from unisono.engine.exchange.flat import Slot
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.rounds import Dispute
from unisono.engine.rounds.gradient import GradientRound, StepContext
from unisono.engine.rounds.life import DELAYED
from unisono.engine.rounds.members import Summed
from unisono.strategies.delay.arrived import Arrived, Committed
from unisono.strategies.delay.underway import Spare
from unisono.system.faults import point

__all__ = ["DelayedRound"]


class DelayedRound(GradientRound):
    """The sum of one step. It is computed ahead, or played after a loss, where it is a round like any other.

    Args:
        spare: has slots for its sum.

    Attributes:
        missing: the plan of what is missing of it after a loss, by what all members have reported.
        came: its sum, where it was played.
    """

    kind: Final = DELAYED  # type: ignore[misc]

    def __init__(self, spare: Spare, context: StepContext, number: int, folder: GradientFolder) -> None:
        super().__init__(context, context.cursor.position(number), folder)
        self.title = "the sum of an earlier step, whose gradient is applied now"
        self.at = number
        self.missing: Plan | None = None
        self.came: Arrived | None = None
        self._spare = spare
        self.layout = folder.layout
        self.num_sums = self._num_sums
        self._arrived: Arrived | None = None

    @property
    def slot(self) -> Slot:
        assert self._arrived is not None
        return self._arrived.slot

    @property
    def values(self) -> dict[int, dict[str, Tensor]]:
        """By micro-batch, what the script has added."""
        return self._values

    def compute_again(self, leaf: int) -> Iterator[object]:
        """Yield a micro-batch of a member that was lost after the commit, for its sums."""
        yield from self._compute_again(leaf)

    def compute_with(self, folder: GradientFolder) -> None:
        """Compute micro-batches with this folder, which may have room for more sums than that of the step."""
        self._folder, self._num_sums = folder, len(self._sums.extras())

    @property
    def is_rehearsed(self) -> bool:
        """Whether a rehearsal has left a fingerprint of one of its micro-batches, which can be fetched again."""
        agreement = self._context.agreement
        if not agreement.is_rehearsed:
            return False
        assert agreement.own is not None
        return self._context.fetcher.is_near(self.at, agreement.own.leaf)

    def look_back(self) -> Generator[object, None, str]:
        """Yield the micro-batch of a rehearsal once more in a later iteration, to compare its gradient.

        Returns:
            In words that it is not the same; "" if it is.
        """
        own = self._context.agreement.own
        assert own is not None
        yield from self._aside(own.leaf)
        again = self._folder.fingerprint(own.leaf)
        if again.digest == own.digest:
            return ""
        return (
            f"micro-batch {own.leaf} of {self.name} was computed again one step later, with the parameters and "
            "buffers that it had, and its gradient is not the same: "
            f"{own.difference(again, 'the first time', 'the second')}. After the loss of a worker, micro-batches "
            "of steps whose gradients are under way are computed again, and would change the result. Something in "
            "the inner loop depends on a variable that the script sets outside of it: compute it there from "
            "step.number, which is the number of the micro-batch's step, or keep it in a tracked buffer. Nothing "
            f"was updated. {NAMES_THE_LINE}"
        )

    # -- ahead ---------------------------------------------------------------------------------------

    def plan_ahead(self) -> Plan:
        """Begin to compute ahead of the sums of earlier steps; returns the plan. Local."""
        plan = super().first_plan()
        super().begin(plan)
        return plan

    def announce(self, *, unlike: bool) -> bytes:
        """Return what goes with the sum, when this member has computed its micro-batches. Local.

        Args:
            unlike: what this member has looked back at was not the same.
        """
        self._close()
        compared = self._context.agreement.says()
        return self._members.announce(msgspec.structs.replace(self._telemetry(), unlike=unlike, compared=compared))

    # -- after a loss --------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        assert self.missing is not None
        return self.missing

    def begin(self, plan: Plan) -> None:
        point("delay.again")
        self._context.agreement.pass_over(self.number)
        self._folder.start_step(self.num_leaves, self.turn.number)
        self._context.guards.start_step()
        self._members.slots.nodes = self._members.slots.ahead.pop(self.at, {})

    def combine(self, plan: Plan) -> Committed:  # type: ignore[override]
        self._close()
        nodes, out = self._members.slots.nodes, self._spare.new_slot(self._folder.layout)
        self._members.team.check()
        with self._members.waiting():
            own = self._members.announce(self._telemetry())
            share = Share(self.num_leaves, plan.nodes, nodes)
            combined = combine(self._members.exchange, share, own, out)
        for slot in nodes.values():
            self._members.release(slot)
        self.came = self.receive(self._members.summed(combined), None)
        return Committed(self.came.slot.layout, self.came)

    def finish(self) -> None:
        point("committed")
        self._clock.switch("other")

    # -- what needs the exchange while the script computes: it is in use for earlier steps ---------------

    def _helping(self, plan: Plan) -> None:
        return None

    def _offer_rows(self, plan: Plan) -> None:
        pass

    # -- its sum -------------------------------------------------------------------------------------

    def receive(self, summed: Summed, share: Share | None) -> Arrived:
        """Return the committed sum with what the micro-batches have added up. Local.

        Args:
            share: this member's part in it; None: it was made after a loss, or comes from another member.
        """
        totals = self._sums.read(summed.slot.extras[: self.num_sums])
        has_new = any(each.new_sums for each in summed.telemetry.values())
        return Arrived(self.at, summed.slot, summed.digest, totals, has_new, summed, share)

    # -- when it is applied --------------------------------------------------------------------------

    def show(self, arrived: Arrived) -> None:
        """Take the committed sum as the result of this round."""
        self._arrived, self.result = arrived, arrived.summed
        self._scalars = arrived.scalars

    def differs(self, arrived: Arrived) -> bool:
        """Return whether the members have computed different values, so that it will be found out who is wrong. Local,
        and the same on all members.
        """
        return arrived.summed is not None and self._context.agreement.differs(arrived.summed.compared)

    def remembered(self) -> Dispute:
        """Return what this member remembers of the sum, in which members `differs`. Local."""
        assert self.result is not None
        self._context.agreement.is_in_dispute(self.result.compared, is_disputed=True)
        dispute = self._context.agreement.dispute
        assert dispute is not None
        return dispute

    def check(self) -> None:
        """Compare what the members have said with the sum. Collective where they differ."""
        assert self.result is not None
        self._context.agreement.check(self.result.compared)
