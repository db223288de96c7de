"""Index of a journal: where its lines are, and the extremes of every number in them.

``journal.index`` has one JSON object (`Block`) for each 64 lines that follow each other, from the journal's beginning
on. It is a cache: whoever reads a long journal writes it (`save`), and the training knows nothing of it. The next
reader computes some of its blocks again from the journal's lines (`load`), and believes all of it or nothing; so a
journal may be cut, copied and written on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import os
import stat
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from unisono.core.events import Seconds
from unisono.record.journal.file import INDEX, JOURNAL
from unisono.record.journal.lines import NO_LINE, number_in
from unisono.system.owned import open_regular

__all__ = [
    "BLOCK_LINES",
    "Block",
    "Placed",
    "Scanned",
    "block_of",
    "columns_of",
    "extremes_of",
    "lines_in",
    "load",
    "save",
    "scan",
]

BLOCK_LINES: Final = 64
NUM_CHECKED: Final = 8
"""So many blocks of an index are computed again before it is believed."""
MOST_INDEX_BYTES: Final = 1 << 28
"""What is longer is no index."""

Extremes = tuple[float, float, float, int]
"""Lowest, highest, sum and count of the finite values."""
Odd = tuple[int, int, int]
"""How many values are not a number, infinite, and negative infinite."""


class Block(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Some lines of a journal that follow each other, as numbers."""

    offset: int
    """Of the first line in the journal, in bytes."""
    end: int
    """Offset after the last line."""
    lines: int
    steps: int = 0
    """How many of the lines are steps."""
    first: int = -1
    """First step; -1: there is none."""
    last: int = -1
    since: float = 0.0
    """Time of the first step; 0: unknown."""
    until: float = 0.0
    values: dict[str, Extremes] = {}
    """By name: loss, step_s, samples, part/compute, log/NAME, total/NAME ..."""
    odd: dict[str, Odd] = {}
    """By name, where there are any."""
    evaluations: list[tuple[int, float, dict[str, float | str]]] = []
    """Step, time, and the totals that are numbers."""


class Scanned(msgspec.Struct, frozen=True, gc=False):
    """Line of a journal, as far as the index needs it."""

    kind: str
    line: int = -1
    time: float = 0.0
    step: int = -1
    loss: float | str | None = math.nan
    samples: int = 0
    seconds: Seconds = Seconds()
    means: Seconds = Seconds()
    logs: dict[str, Any] = {}
    totals: dict[str, Any] = {}
    sent_bytes: int = 0


class Placed(NamedTuple):
    """A line and where it is."""

    offset: int
    end: int
    line: Scanned | None
    """None: it cannot be read."""


_scanned: Final = msgspec.json.Decoder(Scanned)
_blocks: Final = msgspec.json.Decoder(Block)
_PARTS: Final = Seconds.__struct_fields__
_ALL_PARTS: Final = attrgetter(*(f"seconds.{part}" for part in _PARTS))
_ALL_MEANS: Final = attrgetter(*(f"means.{part}" for part in _PARTS))
_UNKNOWN: Final = (None,) * len(_PARTS)
_NONE_ODD: Final = (0, 0, 0)


# -- from lines to blocks ----------------------------------------------------------------------------


def block_of(placed: Sequence[Placed]) -> Block:
    """Return the block of some lines, at least one, that follow each other."""
    steps: list[Scanned] = []
    evaluations: list[tuple[int, float, dict[str, float | str]]] = []
    for _, _, line in placed:
        if line is not None and line.kind == "step" and line.step >= 0:
            steps.append(line)
        elif line is not None and line.kind == "evaluation":
            evaluations.append((line.step, line.time, _plain({**line.totals, **line.logs})))
    values: dict[str, Extremes] = {}
    odd: dict[str, Odd] = {}
    for name, column in columns_of(steps).items():
        (low, high, total, number), strange = extremes_of([value for value in column if value is not None])
        values[name] = low, high, _short(total), number
        if any(strange):
            odd[name] = strange
    return Block(
        offset=placed[0].offset,
        end=placed[-1].end,
        lines=len(placed),
        steps=len(steps),
        first=steps[0].step if steps else -1,
        last=steps[-1].step if steps else -1,
        since=steps[0].time if steps else 0.0,
        until=steps[-1].time if steps else 0.0,
        values=values,
        odd=odd,
        evaluations=evaluations,
    )


def columns_of(steps: Sequence[Scanned]) -> dict[str, list[float | None]]:
    """Return the numbers of some steps by name, as far as one of them has it; None for a step that has none."""
    found: dict[str, list[float | None]] = {}
    if not steps:
        return found
    losses = map(attrgetter("loss"), steps)
    found["loss"] = [loss if type(loss) is float else number_in(loss) for loss in losses]
    parts = list(map(_ALL_PARTS, steps))
    whole: list[float] = list(map(sum, parts))
    samples = [float(step.samples) for step in steps]
    found["step_s"], found["samples"] = [*whole], [*samples]
    rates = zip(samples, whole, strict=True)
    found["samples_per_s"] = [number / seconds if seconds > 0 else None for number, seconds in rates]
    sent = [float(step.sent_bytes) for step in steps]
    if any(sent):
        found["sent_bytes"] = [*sent]
    found |= {f"part/{part}": column for part, *column in zip(_PARTS, *parts, strict=True)}
    means = [row if any(row) else _UNKNOWN for row in map(_ALL_MEANS, steps)]
    if any(row is not _UNKNOWN for row in means):
        found |= {f"mean/{part}": column for part, *column in zip(_PARTS, *means, strict=True)}
    for prefix, told in (("log", [step.logs for step in steps]), ("total", [step.totals for step in steps])):
        columns: dict[str, list[float | None]] = {}
        for at, each in enumerate(told):
            for name, value in each.items():
                if (number := _number(value)) is not None:
                    if name not in columns:
                        columns[name] = [None] * len(steps)
                    columns[name][at] = number
        found |= {f"{prefix}/{name}": column for name, column in columns.items()}
    return found


def _number(value: Any) -> float | None:
    kind = type(value)
    if kind is float or kind is int:
        return float(value) if -1e308 < value < 1e308 else _large(value)
    if kind is str and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def _large(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _plain(totals: dict[str, Any]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, value in totals.items():
        if (number := _number(value)) is not None:
            found[name] = number if math.isfinite(number) else str(number)
    return found


def extremes_of(values: Sequence[float]) -> tuple[Extremes, Odd]:
    """Return the extremes of the finite values, and how many others there are of each kind."""
    total = sum(values)
    if values and math.isfinite(total):
        return (min(values), max(values), total, len(values)), _NONE_ODD
    finite = [value for value in values if math.isfinite(value)]
    odd = (sum(map(math.isnan, values)), values.count(math.inf), values.count(-math.inf))
    if not finite:
        return (0.0, 0.0, 0.0, 0), odd
    total = math.fsum(finite) if max(map(abs, finite)) < 1e300 else math.copysign(1e308, sum(finite))
    return (min(finite), max(finite), total, len(finite)), odd


def _short(value: float) -> float:
    """Return a sum with the digits that its mean needs: what an addition leaves after them is noise."""
    return float(f"{value:.12g}")


# -- reading -----------------------------------------------------------------------------------------


def lines_in(data: bytes) -> list[Scanned]:
    """Return the whole lines in a piece of a journal that begins with a line, as far as they can be read."""
    return [line for line in _lines_in(data) if line is not None]


def _lines_in(data: bytes) -> Sequence[Scanned | None]:
    data = data[: data.rfind(b"\n") + 1]
    with contextlib.suppress(*NO_LINE):
        found = _scanned.decode_lines(data)
        if len(found) == data.count(b"\n"):  # no line is blank
            return found
    return list(map(_line_in, data.split(b"\n")[:-1]))


def _line_in(text: bytes) -> Scanned | None:
    try:
        return _scanned.decode(text)
    except NO_LINE:
        return _forgiving(text)


def scan(offset: int, data: bytes) -> list[Placed]:
    """Return the whole lines of a piece of a journal that begins with a line at ``offset``."""
    texts = data.split(b"\n")[:-1]
    ends = list(itertools.accumulate((len(text) + 1 for text in texts), initial=offset))
    return list(map(Placed, ends, ends[1:], _lines_in(data)))


def _forgiving(text: bytes) -> Scanned | None:
    """Return of a line what can be understood: a newer version may write other types."""
    with contextlib.suppress(*NO_LINE):
        line = msgspec.json.decode(text)
        if isinstance(line, dict) and isinstance(line.get("kind"), str):
            known: dict[str, Any] = {}
            for field in msgspec.structs.fields(Scanned):
                if line.get(field.name) is not None:
                    with contextlib.suppress(msgspec.ValidationError):
                        known[field.name] = msgspec.convert(line[field.name], field.type, strict=False)
            return Scanned(**known)
    return None


# -- the cache ---------------------------------------------------------------------------------------


def load(journal: Path, descriptor: int) -> list[Block]:
    """Return the blocks of a journal that another reader has saved; [] if there are none, or they are not true.

    Args:
        descriptor: of the journal.
    """
    found = os.fstat(descriptor)
    try:
        with open_regular(path_of(journal)) as file:
            own = os.fstat(file.fileno())
            if own.st_uid not in (found.st_uid, os.getuid()):
                return []
            data = file.read(MOST_INDEX_BYTES)
        blocks = _blocks.decode_lines(data[: data.rfind(b"\n") + 1])
    except (OSError, *NO_LINE):
        return []
    ends = [0, *(block.end for block in blocks)]
    is_whole = all(block.offset == end < block.end for block, end in zip(blocks, ends, strict=False))
    if not blocks or not is_whole or blocks[-1].end > found.st_size:
        return []
    each = max(1, len(blocks) // NUM_CHECKED)
    return blocks if all(_is_true(block, descriptor) for block in blocks[::-each]) else []


def _is_true(block: Block, descriptor: int) -> bool:
    """Return whether the lines of a journal give this block."""
    placed = scan(block.offset, os.pread(descriptor, block.end - block.offset, block.offset))
    return bool(placed) and placed[-1].end == block.end and block_of(placed) == block


def save(journal: Path, blocks: Sequence[Block]) -> None:
    """Save the blocks of a journal for the next reader, unless another reader does at this moment.

    Raises:
        OSError: this process may not write there, or the disk is full.
    """
    path = path_of(journal)
    temporary = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    with open(descriptor, "wb") as file:
        own = os.fstat(descriptor)
        if not stat.S_ISREG(own.st_mode) or own.st_nlink > 1:
            raise OSError(errno.EINVAL, "it is not a file of that directory alone", str(temporary))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # a file system without locks: what two readers have mixed up is not believed
        os.ftruncate(descriptor, 0)
        for block in blocks:
            file.write(msgspec.json.encode(block) + b"\n")
        file.flush()
        temporary.replace(path)


def path_of(journal: Path) -> Path:
    """Return the path of a journal's index."""
    return journal.with_name(INDEX if journal.name == JOURNAL else f"{journal.name}.index")
