"""When checkpoints are written, by whom, and which are kept: decisions without I/O.

A checkpoint is an **attempt** of all members: at the same step boundary each of them copies its part of the state, and
writes it while training goes on. They never wait for each other about it. With every combine each member says one
`Word`: whether it wants a checkpoint, which attempt it is at, and how far it is. All hear the same words at the same
step, so all decide the same:

====================================  ==========================================================
the words of all members say          at the next boundary
====================================  ==========================================================
nobody is at an attempt, one is due   all begin one
all are at the same, one still writes training goes on
all are at the same, all have written the committer publishes it; the others forget it
one has failed                        all drop it, and say so; the next one comes when it is due
they are not at the same              all drop it, and want it again
====================================  ==========================================================

The last row, and a change of the members, is what a loss leaves behind: a member that is ahead by a step has not
begun what the others have. Of what was dropped each member removes its part.

The words also say who sees the run's directory, and how far the journal is written: the first that sees it writes it.

The others forget a checkpoint only when nobody says any more that it is publishing one. When the members have changed
by then, those who see the directory look whether it is there, and want it again if it is not.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from unisono.errors import UsageError

__all__ = [
    "Checkpoints",
    "Place",
    "Status",
    "Verdict",
    "Word",
    "assign_parts",
    "choose_kept",
    "choose_writer",
    "differences",
    "is_due",
    "judge",
    "may_begin",
    "table",
]

NO_ATTEMPT: Final = -1


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
    """How many of the newest are kept."""
    keep_best: str | None = None
    """Keep also the one with the best value of this name, of those given to ``step.log`` (or "loss")."""
    best: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is the best."""
    keep_every: int | None = None
    """Keep also those of every so many steps."""
    on_signal: int | None = 143
    """At SIGTERM, finish the step, write a checkpoint and leave with this exit code; None: end at once.

    Under ``unisono run`` Ctrl-C does the same and leaves with 130."""
    overlap: bool = True
    """Copy large parameters and optimizer states while the next micro-batches are computed, which do not change them.
    False copies everything before the next step begins: for a loop whose head, before the inner loop, writes them
    through ``.data``, where it cannot be seen. (Other changes there are seen, and then it is False from there on.)"""
    must_succeed: bool = False
    """End the run when a checkpoint cannot be written; otherwise that is a warning."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_seconds", "keep_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"Checkpoints({name}=...) must be above 0, or None for never; got {value}")
        if self.keep < 1:
            raise UsageError(f"Checkpoints(keep=...) must be at least 1, got {self.keep}")
        if self.best not in ("min", "max"):
            raise UsageError(f"Checkpoints(best=...) is 'min' or 'max', got {self.best!r}")
        if self.on_signal is not None and not 0 <= self.on_signal <= 255:
            raise UsageError(f"Checkpoints(on_signal=...) is an exit code from 0 to 255, or None; got {self.on_signal}")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands, between two steps."""

    phase: int
    """Which call of ``run.steps``, from 0."""
    step: int
    """Steps of the phase that are done."""
    total: int
    """Steps of the run that are done."""
    lines: int
    """Lines of the journal."""


class Status(enum.IntEnum):
    """How far a member is with its attempt. BUSY without an attempt: it publishes the one before."""

    IDLE = 0
    BUSY = 1
    WRITTEN = 2
    FAILED = 3


class Word(NamedTuple):
    """What a member tells the others about checkpoints with every combine: numbers, in this order."""

    wants: float = 0.0
    """1: begin a checkpoint at the next boundary."""
    attempt: float = NO_ATTEMPT
    """The step of the attempt that it is at."""
    status: float = Status.IDLE
    reaches: float = 0.0
    """1: it can write into the run's directory."""
    lines: float = 0.0
    """How many lines of the journal it knows to be in the file; 0 of who does not write it."""


class Verdict(enum.Enum):
    NOTHING = "nobody is at an attempt"
    WAIT = "not all have written"
    COMMIT = "all have written"
    FAIL = "one could not write"
    DROP = "not all are at the same attempt"


def judge(words: Sequence[Word]) -> Verdict:
    """What becomes of the attempt that the members are at."""
    attempts = {word.attempt for word in words}
    if attempts == {NO_ATTEMPT}:
        return Verdict.NOTHING
    if len(attempts) > 1:
        return Verdict.DROP
    if any(word.status == Status.FAILED for word in words):
        return Verdict.FAIL
    return Verdict.COMMIT if all(word.status == Status.WRITTEN for word in words) else Verdict.WAIT


def may_begin(words: Sequence[Word]) -> bool:
    """Whether nobody is busy with an earlier checkpoint, and somebody can write."""
    return all(word.attempt == NO_ATTEMPT and word.status == Status.IDLE for word in words) and any(
        word.reaches for word in words
    )


def choose_writer(worker_ids: Sequence[str], reaching: Collection[str] | None) -> int | None:
    """The rank of the member that writes what one writes for all: the first that can. None: nobody can.

    Args:
        worker_ids: the members, by rank.
        reaching: those that can, by what all have said last; None where nothing was said yet: the first member has
            claimed the directory.
    """
    if reaching is None:
        return 0
    return next((rank for rank, worker_id in enumerate(worker_ids) if worker_id in reaching), None)


def is_due(policy: Checkpoints | None, step: int, words: Iterable[Word]) -> bool:
    """Whether a checkpoint shall begin before step ``step``: the same on all who heard the same words."""
    every = policy.every_steps if policy is not None else None
    return bool(every and step % every == 0) or any(word.wants for word in words)


def assign_parts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Which part each tensor goes into, so that the parts are about as large as each other."""
    loads = [0] * num_parts
    parts = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        part = min(range(num_parts), key=lambda part: (loads[part], part))
        parts[place] = part
        loads[part] += sizes[place]
    return parts


def choose_kept(saved: Mapping[int, Mapping[str, float]], policy: Checkpoints, *, published: int) -> set[int]:
    """Which checkpoints to keep.

    Args:
        saved: by step, the metrics of each checkpoint that is complete.
        published: the step of the one that was written last. It is kept, whatever else is there.
    """
    kept = {published, *sorted(saved)[-policy.keep :]}
    if policy.keep_every is not None:
        kept |= {step for step in saved if step % policy.keep_every == 0}
    if policy.keep_best is not None:
        sign = 1.0 if policy.best == "min" else -1.0
        name = policy.keep_best
        values = {step: sign * metrics[name] for step, metrics in saved.items() if name in metrics}
        if values:
            kept.add(min(values, key=lambda step: (values[step], step)))
    return kept


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Where two recipes differ: (what, in the first, in the second)."""
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
    """Differences as text, one a line."""
    shown = [("", *whose), *rows[:most]]
    widths = [max(len(row[column]) for row in shown) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more")
    return "\n".join(f"  {line}" for line in lines)
