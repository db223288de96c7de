"""Cadence of checkpoints: when one is written, and which are kept. Decisions without I/O.

Every member sends a `CheckpointReport` with every combine. All members of a generation receive the same reports with
the same combine, so all of them decide the same, and no member ever waits for another:

1. A checkpoint is due, or one report wants one. If all members are at the same step and idle, all of them take a
   **snapshot** of the state at the next boundary.
2. The writer thread of each member writes its part of the snapshot while training goes on.
3. When all reports say WRITTEN, the publisher (the first member that sees the run's directory) writes the manifest and
   renames the directory. When its report says PUBLISHED, all members are idle again.

`judge` says what becomes of a snapshot that is under way:

=============================================  =====================================================================
the reports say                                what all members do
=============================================  =====================================================================
all WRITTEN                                    PUBLISH: the publisher publishes the checkpoint
one FAILED                                     FAIL: remove their parts; the next checkpoint is tried when it is due
one CHANGED (tensors, while they were copied)  RETAKE: remove their parts, and take another snapshot
the publisher PUBLISHED                        DONE: forget the snapshot
a new generation, and no member PUBLISHING     LOST: take another snapshot, unless the directory has its final name
anything else                                  WAIT
=============================================  =====================================================================

After a loss, the members that have not seen the commit of a step repeat its combine, and a member that has seen the
commit stands by: that member has passed the boundary that the others are still to reach. The reports show it, because
their steps differ, and no snapshot is taken at that boundary.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec

from unisono.core.errors import UsageError

__all__ = [
    "CheckpointReport",
    "Checkpoints",
    "Position",
    "SnapshotDecision",
    "Status",
    "assign_parts",
    "best_step",
    "choose_kept",
    "differences",
    "is_due",
    "judge",
    "may_begin",
    "table",
]

_ANY: Final[Mapping[int, Collection[int]]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When a run writes checkpoints, and which of them it keeps.

    Whatever is set, one is written at the end of the training and when the run is stopped, and whenever
    ``run.save()`` says so.
    """

    every_steps: int | None = None
    """Write one after every so many steps of the run."""
    every_seconds: float | None = None
    """Write one when the last is that old."""
    keep: int = 3
    """Keep so many of the newest."""
    keep_best: str | None = None
    """Keep also the one with the best value of this name, of those given to ``step.log`` (or "loss")."""
    best: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is the best."""
    keep_every: int | None = None
    """Keep also those of every so many steps."""
    exit_code_on_sigterm: int | None = 143
    """At SIGTERM, finish the step, write a checkpoint and leave with this exit code; None: end at once.

    Under ``unisono run`` Ctrl-C does the same and leaves with 130."""
    overlap: bool = True
    """Copy large parameters and optimizer states while the next micro-batches are computed, which do not change them.
    False copies everything before the next step begins: for a loop whose head, before the inner loop, writes them
    through ``.data``, where it cannot be seen. (Other changes there are seen, and then it is False from there on.)"""
    must_succeed: bool = False
    """End the run when a checkpoint cannot be written; otherwise that is a warning."""
    copies: str | tuple[str, ...] = ()
    """Where complete checkpoints are copied to, in the background: URLs of fsspec (``s3://bucket/runs/digits``,
    ``sftp://host/path``) or paths of other disks. ``--copies-to`` wins over it. A copy that fails is told, and the run
    goes on."""
    copies_wait_s: float = 120.0
    """How long the end of the run, or a stop, waits for its last copy."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_seconds", "keep_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"Checkpoints({name}=...) must be above 0, or None for never; got {value}")
        if not self.copies_wait_s >= 0:
            raise UsageError(f"Checkpoints(copies_wait_s=...) is a time in seconds, got {self.copies_wait_s}")
        given: Any = (self.copies,) if isinstance(self.copies, str) else self.copies
        if not isinstance(given, tuple | list) or not all(isinstance(one, str) and one for one in given):
            raise UsageError(
                f"Checkpoints(copies=...) is a URL or a path (str), or a tuple of them; got {self.copies!r}"
            )
        if self.keep < 1:
            raise UsageError(f"Checkpoints(keep=...) must be at least 1, got {self.keep}")
        if self.best not in ("min", "max"):
            raise UsageError(f"Checkpoints(best=...) must be 'min' or 'max', got {self.best!r}")
        code = self.exit_code_on_sigterm
        if code is not None and not 0 <= code <= 255:
            raise UsageError(f"Checkpoints(exit_code_on_sigterm=...) must be from 0 to 255, or None; got {code}")

    @property
    def places(self) -> tuple[str, ...]:
        """Return where checkpoints are copied to."""
        return (self.copies,) if isinstance(self.copies, str) else tuple(self.copies)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run between two steps."""

    phase: int
    """The number of the call of ``run.steps``, from 0."""
    step: int
    """Steps of the phase that are done."""
    number: int
    """Of the next step within the run. With a delay, steps whose gradients are under way count."""
    total: int
    """Steps of the run that are done."""
    lines: int
    """Lines of the journal."""


class Status(enum.IntEnum):
    """State of a member's work on checkpoints."""

    IDLE = 0
    BUSY = 1
    """Its writer thread has work to do, for the snapshot that is under way or for an earlier one."""
    WRITTEN = 2
    """Its part of the snapshot that is under way is on the disk, or it has none to write."""
    PUBLISHING = 3
    PUBLISHED = 4
    FAILED = 5
    """It could not write its part, or could not publish the checkpoint."""
    CHANGED = 6
    """The script changed tensors while they were copied, so the snapshot is useless."""


class CheckpointReport(NamedTuple):
    """Report of one member about checkpoints, sent to all others with every combine."""

    wants: bool = False
    """Take a snapshot at the next boundary."""
    step: int = 0
    """The steps of the run that were done at the last boundary of this member."""
    status: int = Status.IDLE
    reaches: bool = False
    """The member sees the run's directory, and can write into it."""
    lines: int = 0
    """How many lines of the journal are in the file, as far as its writer knows; 0 from all other members."""
    evaluated: bool = False
    """The member sees that an evaluation beside the training has come to its end."""


class SnapshotDecision(enum.Enum):
    """Decision about the snapshot that is under way."""

    WAIT = enum.auto()
    PUBLISH = enum.auto()
    DONE = enum.auto()
    FAIL = enum.auto()
    RETAKE = enum.auto()
    LOST = enum.auto()


def judge(reports: Sequence[CheckpointReport], *, publisher: int, same_generation: bool) -> SnapshotDecision:
    """Decide what becomes of the snapshot that is under way.

    Args:
        reports: of all members, by rank.
        publisher: the rank of the member that publishes it.
        same_generation: whether the snapshot was taken in the generation of the reports.
    """
    statuses = [report.status for report in reports]
    if not same_generation:
        return SnapshotDecision.WAIT if Status.PUBLISHING in statuses else SnapshotDecision.LOST
    if Status.FAILED in statuses:
        return SnapshotDecision.FAIL
    if Status.CHANGED in statuses:
        return SnapshotDecision.RETAKE
    if statuses[publisher] in (Status.PUBLISHED, Status.IDLE):
        return SnapshotDecision.DONE
    return SnapshotDecision.PUBLISH if all(status == Status.WRITTEN for status in statuses) else SnapshotDecision.WAIT


def may_begin(reports: Sequence[CheckpointReport]) -> bool:
    """Return whether all members can take a snapshot at the boundary that follows these reports."""
    is_free = all(report.status in (Status.IDLE, Status.PUBLISHED, Status.CHANGED) for report in reports)
    is_level = len({report.step for report in reports}) == 1
    return is_free and is_level and any(report.reaches for report in reports)


def is_due(policy: Checkpoints | None, step: int, reports: Iterable[CheckpointReport] = ()) -> bool:
    """Return whether a snapshot is to be taken before step ``step``: the same on all members with the same reports."""
    every = policy.every_steps if policy is not None else None
    return bool(every and step % every == 0) or any(report.wants for report in reports)


def assign_parts(sizes: Sequence[int], num_parts: int, allowed: Mapping[int, Collection[int]] = _ANY) -> list[int]:
    """Return the number of the part that each tensor goes into, so that all parts are about equally large.

    Args:
        allowed: by number of a tensor, the parts that it may go into; every part where nothing is said.
    """
    loads = [0] * num_parts
    parts = [0] * len(sizes)
    everywhere = range(num_parts)
    # Those that have little choice come first.
    for index in sorted(range(len(sizes)), key=lambda index: (index not in allowed, -sizes[index], index)):
        part = min(allowed.get(index, everywhere), key=lambda part: (loads[part], part))
        parts[index] = part
        loads[part] += sizes[index]
    return parts


def choose_kept(saved: Mapping[int, Mapping[str, float]], policy: Checkpoints, *, published: int) -> set[int]:
    """Return the steps of the checkpoints to keep.

    Args:
        saved: step -> metrics of each complete checkpoint.
        published: the step of the checkpoint that was written last; it is always kept.
    """
    kept = {published, *sorted(saved)[-policy.keep :]}
    if policy.keep_every is not None:
        kept |= {step for step in saved if step % policy.keep_every == 0}
    if policy.keep_best is not None:
        best = best_step(saved, policy.keep_best, policy.best)
        if best is not None:
            kept.add(best)
    return kept


def best_step(saved: Mapping[int, Mapping[str, float]], name: str, best: Literal["min", "max"]) -> int | None:
    """Return the step with the best value of a figure, the first of several; None: no step has this figure.

    Args:
        saved: step -> metrics.
    """
    sign = 1.0 if best == "min" else -1.0
    values = {step: sign * metrics[name] for step, metrics in saved.items() if name in metrics}
    return min(values, key=lambda step: (values[step], step), default=None)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the differences of two recipes: (name, value in the first, value in the second)."""
    found = []
    for name in dict.fromkeys((*saved, *now)):
        mine, theirs = saved.get(name, "-"), now.get(name, "-")
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found += [(f"{name}: {inner}", a, b) for inner, a, b in differences(mine, theirs)]
        elif mine != theirs:
            found.append((name, str(mine), str(theirs)))
    return found


def table(
    rows: Sequence[tuple[str, str, str]], *, whose: tuple[str, str] = ("checkpoint", "script"), most: int = 12
) -> str:
    """Return differences as text, one per line."""
    shown = [("", *whose), *rows[:most]]
    widths = [max(len(row[column]) for row in shown) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more")
    return "\n".join(f"  {line}" for line in lines)
