"""The committed sum of a step, which is applied later, and how it reaches members that have not seen its commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from unisono.decisions.plan import Plan
from unisono.exchange import Share
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Slot
from unisono.rounds import Finished
from unisono.rounds.members import Members, Summed
from unisono.state.sums import Total
from unisono.telemetry import StepTelemetry

__all__ = ["Arrived", "Committed", "give"]


@dataclass
class Arrived:
    """The committed sum of a step."""

    number: int
    """Of the step within ``run.steps``."""
    slot: Slot
    """The means, in memory of this member's own."""
    digest: int
    totals: dict[str, Total]
    has_new_sums: bool
    """Micro-batches have added sums for which there was no room, and which are in nobody's totals yet."""
    summed: Summed | None = None
    """None: it has come with the state of the run."""
    share: Share | None = None
    """This member's part in the sum; None: the sum was made after a loss, or comes from another member."""
    is_stale: bool = False
    """What the members have said with it does not count any more."""

    @cached_property
    def scalars(self) -> tuple[float, float]:
        """The total weight, scaled, and the weighted loss. Read before the slot is used for another step."""
        weight, weighted_loss = self.slot.scalars.tolist()
        return weight, weighted_loss

    @property
    def telemetry(self) -> Mapping[str, StepTelemetry]:
        """What the members have said with it, by worker id."""
        return self.summed.telemetry if self.summed is not None else {}

    @property
    def sent_bytes(self) -> int:
        """Data that this member has sent to other hosts for it."""
        return self.summed.sent_bytes if self.summed is not None else 0


@dataclass(frozen=True)
class Committed:
    """The newest commit of a step, kept for members that have not seen it: they are sent the result."""

    layout: FlatLayout
    arrived: Arrived

    def stand_by(self, plan: Plan) -> None:
        raise AssertionError("the result of a delayed sum is sent to members that have not seen its commit")


class _Gift(msgspec.Struct, frozen=True):
    """What a member sends with a result to members that have not seen the commit."""

    digest: int
    workers: list[str]
    telemetry: list[bytes]


def give(members: Members, source: int, finished: Finished, new_slot: Callable[[FlatLayout], Slot]) -> Summed:
    """Send the result of the newest commit to members that have not seen it; returns the result. Collective.

    Args:
        source: the rank of the member that sends.
        finished: what this member has committed last.
        new_slot: makes a slot for the result, where this member is not the source.
    """
    gift = b""
    if members.rank == source:
        assert isinstance(finished, Committed)
        slot, known = finished.arrived.slot, finished.arrived.telemetry
        gift = msgspec.msgpack.encode(
            _Gift(finished.arrived.digest, list(known), [each.pack() for each in known.values()])
        )
    else:
        layout = members.slots.layout
        assert layout is not None
        slot = new_slot(layout)
    said = msgspec.msgpack.decode(members.exchange.all_gather(gift)[source], type=_Gift)
    members.exchange.broadcast(slot.memory[: slot.layout.num_rows * ROW_BYTES], source)
    telemetry = {one: StepTelemetry.unpack(each) for one, each in zip(said.workers, said.telemetry, strict=True)}
    return Summed(slot, said.digest, telemetry)
