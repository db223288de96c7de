"""Numbers that each member sends to all others with every combine: they travel with the sums, without an extra trip.

An exchange carries them as `TELEMETRY_BYTES` bytes whose meaning it does not know.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from unisono.core.cadence import CheckpointReport
from unisono.core.events import Seconds
from unisono.core.waits import NOBODY, UNTOLD

__all__ = ["NOT_COMPARED", "PARTS", "TELEMETRY_BYTES", "UNKNOWN", "StepTelemetry", "StepTimes"]

NOT_COMPARED: Final = -1

PARTS: Final = Seconds.__struct_fields__
"""Names of the parts of a step's wall time."""


class StepTimes(msgspec.Struct, frozen=True):
    """What a member has measured in a step, besides the seconds of its parts. The names are those of `WorkerTimes`."""

    waits_for: int = NOBODY
    """Rank."""
    waits_s: float = 0.0
    page_faults: int = 0

    def of_workers(self) -> StepTimes:
        """Return this for members that may have other ranks meanwhile: without what has to do with others."""
        return StepTimes(page_faults=self.page_faults)


UNKNOWN: Final = StepTimes()


class StepTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of one member at one combine. A digest is an unsigned number of 64 bits."""

    leaves: int = 0
    """Micro-batches that this member has computed for this step."""
    data_s: float = 0.0
    """Seconds of this step so far."""
    compute_s: float = 0.0
    ready_s: float = UNTOLD
    """Seconds from the commit before until this member had computed all that it brings (`unisono.core.waits`)."""
    last: Seconds = Seconds()
    """All seconds of the step before: those of an exchange are known only after it."""
    times: StepTimes = UNKNOWN
    """What else is known of the step before. Its ranks are those of this combine."""
    newest_generation: int = 0
    """The newest planned generation that this member has a notice of; 0: none."""
    first_of_host: int = 0
    """The first rank of those that this member shares memory with."""
    arithmetic: int = 0
    """Fingerprint of processor, device and torch version: members with different ones may compute different bits."""
    compared_step: int = NOT_COMPARED
    """The number of the step, of the whole run, before which the member has taken the digest of its state."""
    state_digest: int = 0
    copies_generation: int = NOT_COMPARED
    """The generation in which the member has taken the digest of its copies of shared states, if it is still that."""
    copies_digest: int = 0
    """This member's part of a sum that is 0 where all copies are equal."""
    own_leaf: int = NOT_COMPARED
    """A micro-batch that this member has computed and another member has computed as well; a number that stands for
    several of them (`unisono.core.checks.key_of`)."""
    own_digest: int = 0
    """The digest of the gradient of ``own_leaf``, or of those that it stands for."""
    other_leaf: int = NOT_COMPARED
    """A micro-batch of another member that this one has computed as well, or a number that stands for several."""
    other_digest: int = 0
    """The digest of the gradient of ``other_leaf``, or of those that it stands for."""
    unlike: bool = False
    """With a delay: a micro-batch that this member has computed again in a later step had another gradient then."""
    new_sums: bool = False
    """A micro-batch of this member has added sums for which the layout has no room yet."""
    checkpoint: CheckpointReport = CheckpointReport(False, -1, 0, False, 0, False)

    def pack(self) -> bytes:
        """Return `TELEMETRY_BYTES` bytes."""
        leaves, data_s, compute_s, ready_s, last, times, *numbers, report = msgspec.structs.astuple(self)
        seconds, measured = msgspec.structs.astuple(last), msgspec.structs.astuple(times)
        return _FORMAT.pack(leaves, data_s, compute_s, ready_s, *seconds, *measured, *numbers, *report)

    @classmethod
    def unpack(cls, packed: bytes) -> StepTelemetry:
        """Return the telemetry that ``packed`` was made from."""
        leaves, data_s, compute_s, ready_s, *rest = _FORMAT.unpack(packed)
        last = Seconds(**dict(zip(PARTS, rest[: len(PARTS)], strict=True)))
        rest = rest[len(PARTS) :]
        times = StepTimes(*rest[: len(_TIMES)])
        rest = rest[len(_TIMES) :]
        values: tuple[Any, ...] = (
            leaves,
            data_s,
            compute_s,
            ready_s,
            last,
            times,
            *rest[:-_REPORT],
            CheckpointReport(*rest[-_REPORT:]),
        )
        return cls(**dict(zip(cls.__struct_fields__, values, strict=True)))


_REPORT: Final = len(CheckpointReport._fields)
_TIMES: Final = StepTimes.__struct_fields__
_FORMAT = struct.Struct(f"<q{3 + len(PARTS)}dqdq3qqQqQqQqQ???qb?q?")
"""The fields in their order: counts and seconds, times, generations, comparisons, the checkpoint report."""

TELEMETRY_BYTES: Final = _FORMAT.size
