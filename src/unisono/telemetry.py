"""Numbers that each member sends to all others with every combine: they travel with the sums, without an extra trip.

An exchange carries them as `TELEMETRY_BYTES` bytes whose meaning it does not know.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

from unisono.decisions.cadence import CheckpointReport

__all__ = ["NOT_COMPARED", "PARTS", "TELEMETRY_BYTES", "StepSeconds", "StepTelemetry"]

NOT_COMPARED: Final = -1


class StepSeconds(NamedTuple):
    """Parts of the wall time of a step; together all of it."""

    data: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    """For other members."""
    other: float = 0.0


PARTS: Final = StepSeconds._fields


class StepTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of one member at one combine. A digest is an unsigned number of 64 bits."""

    leaves: int = 0
    """Micro-batches that this member has computed for this step."""
    data_s: float = 0.0
    """Seconds of this step so far."""
    compute_s: float = 0.0
    last: StepSeconds = StepSeconds()
    """All seconds of the step before: those of an exchange are known only after it."""
    newest_generation: int = 0
    """The newest planned generation that this member has a notice of; 0: none."""
    first_of_host: int = 0
    """The first rank of those that this member shares memory with."""
    arithmetic: int = 0
    """Fingerprint of processor, device and torch version: members with different ones may compute different bits."""
    compared_step: int = NOT_COMPARED
    """The number of the step, of the whole run, before which the member has taken the digest of its state."""
    state_digest: int = 0
    own_leaf: int = NOT_COMPARED
    """A micro-batch that this member has computed and another member has computed as well."""
    own_digest: int = 0
    """The digest of the gradient of ``own_leaf``."""
    other_leaf: int = NOT_COMPARED
    """A micro-batch of another member that this one has computed as well."""
    other_digest: int = 0
    """The digest of the gradient of ``other_leaf``."""
    checkpoint: CheckpointReport = CheckpointReport()

    def pack(self) -> bytes:
        """Return `TELEMETRY_BYTES` bytes."""
        wants, step, status, reaches, lines = self.checkpoint
        return _FORMAT.pack(
            self.leaves,
            self.data_s,
            self.compute_s,
            *self.last,
            self.newest_generation,
            self.first_of_host,
            self.arithmetic,
            self.compared_step,
            self.state_digest,
            self.own_leaf,
            self.own_digest,
            self.other_leaf,
            self.other_digest,
            *(wants, step, status, reaches, lines),
        )

    @classmethod
    def unpack(cls, packed: bytes) -> StepTelemetry:
        """Return the telemetry that ``packed`` was made from."""
        leaves, data_s, compute_s, *rest = _FORMAT.unpack(packed)
        last, numbers, report = rest[:5], rest[5:14], rest[14:]
        generation, host, arithmetic, step, state_digest, own_leaf, own_digest, other_leaf, other_digest = numbers
        return cls(
            leaves=leaves,
            data_s=data_s,
            compute_s=compute_s,
            last=StepSeconds(*last),
            newest_generation=generation,
            first_of_host=host,
            arithmetic=arithmetic,
            compared_step=step,
            state_digest=state_digest,
            own_leaf=own_leaf,
            own_digest=own_digest,
            other_leaf=other_leaf,
            other_digest=other_digest,
            checkpoint=CheckpointReport(*report),
        )


_FORMAT = struct.Struct("<q7d3qqQqQqQ?qb?q")
"""The fields in their order: counts and seconds, generations, comparisons, the checkpoint report."""

TELEMETRY_BYTES: Final = _FORMAT.size
