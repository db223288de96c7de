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

__all__ = ["NOT_COMPARED", "PARTS", "TELEMETRY_BYTES", "UNKNOWN", "StepTelemetry", "StepTimes", "in_microseconds"]

NOT_COMPARED: Final = -1

PARTS: Final = Seconds.__struct_fields__
"""Names of the parts of a step's wall time."""


def in_microseconds(seconds: float) -> float:
    """Return seconds, rounded to microseconds, where they are measured: what keeps or shows them has less to write."""
    return round(seconds, 6)


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


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What a member says of the values that it holds and has computed, to compare them. A digest is an unsigned number
    of 64 bits.
    """

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
    several of them (`unisono.core.rehearsals.key_of`)."""
    own_digest: int = 0
    """The digest of the gradient of ``own_leaf``, or of those that it stands for."""
    other_leaf: int = NOT_COMPARED
    """A micro-batch of another member that this one has computed as well, or a number that stands for several."""
    other_digest: int = 0
    """The digest of the gradient of ``other_leaf``, or of those that it stands for."""
    part: int = 0
    """The part of the model that the member carries, of which its digests of gradients are."""


class StepTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of one member at one combine: numbers of the step itself, and sections."""

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
    compared: Compared = Compared()
    unlike: bool = False
    """With a delay: a micro-batch that this member has computed again in a later step had another gradient then."""
    new_sums: bool = False
    """A micro-batch of this member has added sums for which the layout has no room yet."""
    checkpoint: CheckpointReport = CheckpointReport(False, -1, 0, False, 0, False)

    def pack(self) -> bytes:
        """Return `TELEMETRY_BYTES` bytes."""
        packed = [_OWN.pack(*(getattr(self, name) for name in _OWN_NAMES))]
        for name, (_, names, section) in _SECTIONS.items():
            value = getattr(self, name)
            packed.append(section.pack(*(getattr(value, one) for one in names)))
        return b"".join(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> StepTelemetry:
        """Return the telemetry that ``packed`` was made from."""
        found: dict[str, Any] = dict(zip(_OWN_NAMES, _OWN.unpack_from(packed), strict=True))
        start = _OWN.size
        for name, (kind, names, section) in _SECTIONS.items():
            found[name] = kind(**dict(zip(names, section.unpack_from(packed, start), strict=True)))
            start += section.size
        return cls(**found)


_SECTIONS: Final[dict[str, tuple[type[Any], tuple[str, ...], struct.Struct]]] = {
    "last": (Seconds, PARTS, struct.Struct(f"<{len(PARTS)}d")),
    "times": (StepTimes, StepTimes.__struct_fields__, struct.Struct("<qdq")),
    "compared": (Compared, Compared.__struct_fields__, struct.Struct("<qqQqQqQqQq")),
    "checkpoint": (CheckpointReport, CheckpointReport._fields, struct.Struct("<?qb?q?")),
}
"""By field, what a section is, and its numbers in their order."""
_OWN_NAMES: Final = tuple(name for name in StepTelemetry.__struct_fields__ if name not in _SECTIONS)
_OWN = struct.Struct("<q3d2q??")
"""The other fields in their order: counts, seconds, generations, flags."""

TELEMETRY_BYTES: Final = _OWN.size + sum(section.size for _, _, section in _SECTIONS.values())
