"""What a worker of a trial writes down, line by line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

__all__ = [
    "Changed",
    "DoubtRecord",
    "LeafRecord",
    "Record",
    "Section",
    "StateRecord",
    "StatementEvent",
    "Sum",
    "Where",
    "records_of",
]


class Where(msgspec.Struct, frozen=True):
    """A part of a training.

    Attributes:
        step: of the run; -1: before its first step.
        stage: ``setup``, ``head`` (before the inner loop), ``fetch`` and ``leaf`` (of a micro-batch), ``update``,
            ``evaluation`` (of a batch).
        leaf: the micro-batch, or the batch.
    """

    step: int
    stage: str
    turn: int = 0
    replica: int = -1
    inner: int = -1
    leaf: int = -1


class StateRecord(msgspec.Struct, frozen=True, tag=True):
    """Digests of all that is tracked, by path, before a step."""

    step: int
    parts: dict[str, str]


class LeafRecord(msgspec.Struct, frozen=True, tag=True):
    """What a micro-batch has given. ``loss`` is a text, because JSON has no NaN."""

    where: Where
    loss: str
    parts: dict[str, str]
    aside: bool = False


class Sum(msgspec.Struct, frozen=True, tag=True):
    """The result of a pass over a global batch."""

    where: Where
    digest: str
    totals: dict[str, str] = {}


class StatementEvent(msgspec.Struct, frozen=True, array_like=True):
    """A statement of the script that begins, or one that has ended.

    Attributes:
        is_end: it has ended.
        values: by path, before the statement: what it reads; after it: what it has changed or may have written.
        depth: how many functions of the script are being executed.
        changed: the paths whose values are others than before it.
    """

    is_end: bool
    file: str
    line: int
    values: dict[str, str]
    depth: int = 0
    changed: tuple[str, ...] = ()


class Section(msgspec.Struct, frozen=True, tag=True):
    """The statements of the script in one part of the training."""

    where: Where
    events: list[StatementEvent]
    aside: bool = False
    is_cut: bool = False
    """There were more than are kept."""


class Changed(msgspec.Struct, frozen=True, tag=True):
    """A statement that has changed a parameter within a micro-batch."""

    where: Where
    parameter: str
    file: str
    line: int
    text: str


class DoubtRecord(msgspec.Struct, frozen=True, tag=True):
    """What a line of the script probably means otherwise than a step takes it (`unisono.engine.microbatch.doubts`)."""

    file: str
    line: int
    text: str


Record = StateRecord | LeafRecord | Sum | Section | Changed | DoubtRecord
_LINE = msgspec.json.Decoder(Record)


def records_of(folder: Path) -> dict[str, list[Record]]:
    """Return the records of all workers of a trial, by worker. A half line, of one that was killed, is left out."""
    found: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        found[path.stem] = []
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(msgspec.MsgspecError):
                found[path.stem].append(_LINE.decode(line))
    return found
