"""The committed sum of a step, which is applied later, and how it reaches members that have not seen its commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch

from unisono.core.plan import Plan
from unisono.core.telemetry import StepTelemetry
from unisono.engine.exchange import Parcel, Share
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Slot
from unisono.engine.rounds import Finished
from unisono.engine.rounds.members import Members, Summed
from unisono.engine.state.sums import Total

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


def give(
    members: Members,
    source: int,
    targets: Sequence[int],
    finished: Finished,
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
        slot, known = finished.arrived.slot, finished.arrived.telemetry
        gift = msgspec.msgpack.encode(
            _Gift(finished.arrived.digest, list(known), [each.pack() for each in known.values()])
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
