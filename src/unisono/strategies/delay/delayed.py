"""A step whose gradient is applied later, and how its sum reaches members that have not seen the commit.

`unisono.strategies.delay.pipeline` says when it is applied, and what a loss does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from unisono.core.plan import Plan
from unisono.core.telemetry import StepTelemetry
from unisono.core.words import NAMES_THE_LINE
from unisono.engine.exchange import Parcel, Share, combine
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Slot
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.rounds import Dispute, FinishedRound
from unisono.engine.rounds.gradient import GradientRound, StepContext
from unisono.engine.rounds.members import Members, Summed
from unisono.engine.state.earlier_values import Values
from unisono.engine.state.sums import Total
from unisono.strategies.delay.underway import Spare
from unisono.system.faults import point

__all__ = ["Committed", "DelayedRound", "give", "kind_of"]


def kind_of(number: int) -> str:
    """Return the kind of the round of a step: several are open at the same time."""
    return f"delayed {number}"


@dataclass(frozen=True)
class Committed:
    """The newest commit of a step, kept for members that have not seen it: they are sent the result."""

    layout: FlatLayout
    summed: Summed

    def stand_by(self, plan: Plan) -> None:
        raise AssertionError("the result of a delayed sum is sent to members that have not seen its commit")


class DelayedRound(GradientRound):
    """The sum of one step. It is computed ahead, or played after a loss, where it is a round like any other.

    Args:
        number: of the step within ``run.steps``.
        spare: has slots for its sum.

    Attributes:
        result: the means, in memory of this member's own, once they are committed.
        share: this member's part in the sum; None: the sum was made after a loss, or comes from another member, or with
            the state of the run.
        values: with what it is computed, where it may have to be computed again.
        has_new_sums: micro-batches have added sums for which there was no room, and which are in nobody's totals yet.
        is_disputed: members have computed different values of it.
        is_stale: what the members have said with it does not count any more.
    """

    def __init__(self, spare: Spare, context: StepContext, number: int, folder: GradientFolder) -> None:
        super().__init__(context, context.cursor.position(number), folder)
        self.kind = kind_of(number)
        self.title = "the sum of an earlier step, whose gradient is applied now"
        self.at = number
        self.layout = folder.layout
        self.share: Share | None = None
        self.values: Values | None = None
        self.has_new_sums = self.is_disputed = self.is_stale = False
        self._spare = spare

    @property
    def slot(self) -> Slot:
        return self.summed.slot

    @property
    def summed(self) -> Summed:
        """The sum, once it is committed."""
        assert self.result is not None
        return self.result

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
            f"micro-batch {own.leaf} of {self.name} was recomputed one step later, with the same parameters and "
            f"buffers, but its gradient differs: {own.difference(again, 'the first time', 'the second')}. After the "
            "loss of a worker, micro-batches of steps whose gradients are in flight are recomputed, which would "
            "change the result. Something in the inner loop depends on a variable that the script sets outside it: "
            "compute it there from step.number, the number of the micro-batch's step, or keep it in a tracked buffer. "
            f"Nothing was updated. {NAMES_THE_LINE}"
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
        return self._context.rounds.plan_of_open(self)

    def begin(self, plan: Plan) -> None:
        point("delay.again")
        self._context.agreement.pass_over(self.number)
        self._folder.start_step(self.num_leaves, self.turn.number)
        self._context.guards.start_step()

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
        self.receive(self._members.summed(combined), None)
        return Committed(self.slot.layout, self.summed)

    def finish(self) -> None:
        point("committed")
        self._clock.switch("other")

    # -- what needs the exchange while the script computes: it is in use for earlier steps ---------------

    def _helping(self, plan: Plan) -> None:
        return None

    def _offer_rows(self, plan: Plan) -> None:
        pass

    # -- its sum -------------------------------------------------------------------------------------

    def receive(self, summed: Summed, share: Share | None) -> None:
        """Take the committed sum, with what the micro-batches have added up. Local.

        Args:
            share: as the attribute.
        """
        self.result, self.share = summed, share
        self.totals = dict(self._read_from(summed.slot).totals)
        self.has_new_sums = any(each.new_sums for each in summed.telemetry.values())
        self.is_disputed = self._context.agreement.differs(summed.compared)

    def load(self, slot: Slot, digest: int, totals: dict[str, Total], *, has_new_sums: bool) -> None:
        """Take the sum that has come with the state of the run. Local."""
        self.result, self.totals, self.has_new_sums = Summed(slot, digest, {}), totals, has_new_sums
        weight, weighted_loss = slot.scalars.tolist()
        self._scalars = weight, weighted_loss

    # -- when it is applied --------------------------------------------------------------------------

    def show(self, shown: Slot, folder: GradientFolder) -> None:
        """Make the means the parameters' ``.grad``, and put buffers in force. Local.

        Args:
            shown: the sum, or a copy of it.
            folder: of the parameters as they are now.
        """
        if (known := self._read) is None:  # it has come with the state of the run
            folder.show(shown)
        else:
            folder.show(shown, known.used, may_break=known.may_break)

    def remembered(self) -> Dispute:
        """Return what this member remembers of the sum, where it `is_disputed`. Local."""
        self._context.agreement.is_in_dispute(self.summed.compared, is_disputed=True)
        dispute = self._context.agreement.dispute
        assert dispute is not None
        return dispute

    def check(self) -> None:
        """Compare what the members have said with the sum. Collective where they differ."""
        self._context.agreement.check(self.summed.compared)


class _Gift(msgspec.Struct, frozen=True):
    """What a member sends with a result to members that have not seen the commit."""

    digest: int
    workers: list[str]
    telemetry: list[bytes]


def give(
    members: Members,
    source: int,
    targets: Sequence[int],
    finished: FinishedRound,
    new_slot: Callable[[FlatLayout], Slot],
) -> Summed | None:
    """Send the result of the newest commit to members that have not seen it. Collective.

    Args:
        source: the rank of the member that sends.
        targets: the ranks of the members that have not seen the commit.
        finished: what this member has committed last.
        new_slot: makes a slot for the result, where this member is a target.

    Returns:
        The result, on a target. On all others None.
    """
    gift = b""
    slot: Slot | None = None
    if members.rank == source:
        assert isinstance(finished, Committed)
        slot, known = finished.summed.slot, finished.summed.telemetry
        gift = msgspec.msgpack.encode(
            _Gift(finished.summed.digest, list(known), [each.pack() for each in known.values()])
        )
    layout = members.slots.layout if members.rank in targets else finished.layout
    assert layout is not None
    if members.rank in targets:
        slot = new_slot(layout)
    said = msgspec.msgpack.decode(members.exchange.all_gather(gift)[source], type=_Gift)
    nbytes = layout.num_rows * ROW_BYTES
    rows = slot.memory[:nbytes] if slot is not None else torch.empty(nbytes, dtype=torch.uint8, device="meta")
    members.exchange.deliver([Parcel(source, tuple(targets), rows)])
    if slot is None or members.rank == source:
        return None
    telemetry = {one: StepTelemetry.unpack(each) for one, each in zip(said.workers, said.telemetry, strict=True)}
    return Summed(slot, said.digest, telemetry)
