"""Index of a journal: where its lines are, and the extremes of every number in them.

``journal.index`` has one JSON object (`Block`) for each 64 lines that follow each other. The journal's writer adds one
when the 64th line is written. An index is never needed: what it lacks is read from the journal. It is believed only
where the journal has what it says (`is_true`), so a journal may be cut, copied, or written by a version that knows no
index.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import msgspec

from unisono.events import Seconds, StepFinished
from unisono.journal.lines import LineEvent, number_in

__all__ = [
    "BLOCK_LINES",
    "INDEX",
    "Block",
    "Indexer",
    "Placed",
    "Scanned",
    "block_of",
    "column_of",
    "cut",
    "is_true",
    "lines_in",
    "path_of",
    "read_blocks",
    "scan",
    "true_blocks",
]

INDEX: Final = "journal.index"
BLOCK_LINES: Final = 64
CATCH_UP_BYTES: Final = 1 << 18
"""A new writer indexes at once so much of what its predecessor has not, and the rest by and by."""
PIECE_BYTES: Final = 1 << 16
"""So much with each block that it writes."""

Extremes = tuple[float, float, float, int]
"""Lowest, highest, sum and count of the finite values."""


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some lines of a journal that follow each other, as numbers."""

    offset: int
    """Of the first line in the journal, in bytes."""
    end: int
    """Offset after the last line."""
    check: int
    """CRC-32 of the last line."""
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
    odd: dict[str, tuple[int, int, int]] = {}
    """By name, where there are any: how many values are not a number, infinite, and negative infinite."""
    evaluations: list[tuple[int, float, dict[str, float | str]]] = []
    """Step, time, and the totals that are numbers."""
    others: list[tuple[int, str]] = []
    """Offset and kind of the lines that are no steps."""
    holes: list[tuple[int, int]] = []
    """Parts of the journal before this block that had no block yet when it was written."""


class StepLike(Protocol):
    """A step as the index sees it: the event, or its line."""

    @property
    def step(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def seconds(self) -> Seconds: ...
    @property
    def logs(self) -> dict[str, Any]: ...
    @property
    def totals(self) -> dict[str, Any]: ...
    @property
    def sent_bytes(self) -> int: ...


class Scanned(msgspec.Struct, frozen=True):
    """Line of a journal, as far as the index needs it."""

    kind: str
    line: int = -1
    time: float = 0.0
    step: int = -1
    loss: float | str | None = math.nan
    samples: int = 0
    seconds: Seconds = Seconds()
    logs: dict[str, Any] = {}
    totals: dict[str, Any] = {}
    sent_bytes: int = 0


class Placed(NamedTuple):
    """A line and where it is."""

    offset: int
    end: int
    text: bytes
    line: Scanned | LineEvent | None
    """None: it cannot be read."""


_scanned: Final = msgspec.json.Decoder(Scanned)
_blocks: Final = msgspec.json.Decoder(Block)
_PARTS: Final = Seconds.__struct_fields__
_ALL_PARTS: Final = attrgetter(*(f"seconds.{part}" for part in _PARTS))


def path_of(journal: Path) -> Path:
    """Return the path of a journal's index."""
    return journal.with_name(INDEX if journal.name == "journal.jsonl" else f"{journal.name}.index")


# -- from lines to blocks ----------------------------------------------------------------------------


def block_of(placed: Sequence[Placed]) -> Block:
    """Return the block of some lines, at least one, that follow each other."""
    steps: list[Any] = []
    evaluations: list[tuple[int, float, dict[str, float | str]]] = []
    others: list[tuple[int, str]] = []
    for offset, _, _, line in placed:
        kind = kind_of(line)
        if kind == "step" and line is not None and line.step >= 0:  # type: ignore[union-attr]
            steps.append(line)
        else:
            others.append((offset, kind))
            if kind == "evaluation" and line is not None:
                evaluations.append((line.step, line.time, _plain({**line.totals, **line.logs})))  # type: ignore[union-attr]
    values: dict[str, Extremes] = {}
    odd: dict[str, tuple[int, int, int]] = {}
    for name, column in columns_of(steps):
        extremes, strange = _extremes(column)
        values[name] = extremes
        if strange is not None:
            odd[name] = strange
    return Block(
        offset=placed[0].offset,
        end=placed[-1].end,
        check=zlib.crc32(placed[-1].text),
        lines=len(placed),
        steps=len(steps),
        first=steps[0].step if steps else -1,
        last=steps[-1].step if steps else -1,
        since=steps[0].time if steps else 0.0,
        until=steps[-1].time if steps else 0.0,
        values=values,
        odd=odd,
        evaluations=evaluations,
        others=others,
    )


def kind_of(line: Scanned | LineEvent | None) -> str:
    if isinstance(line, StepFinished):
        return "step"
    if isinstance(line, Scanned):
        return line.kind
    return str(type(line).__struct_config__.tag) if line is not None else ""


def columns_of(steps: Sequence[StepLike]) -> Iterator[tuple[str, list[float]]]:
    """Yield the numbers of some steps by name: a list of those that there are."""
    if not steps:
        return
    yield "loss", [number_in(step.loss) for step in steps]  # type: ignore[attr-defined]
    parts = [[getattr(step.seconds, part) for step in steps] for part in _PARTS]
    whole: list[float] = list(map(sum, zip(*parts, strict=True)))
    samples = [float(step.samples) for step in steps]
    yield "step_s", whole
    yield "samples", samples
    yield "samples_per_s", [each / seconds for each, seconds in zip(samples, whole, strict=True) if seconds > 0]
    sent = [float(step.sent_bytes) for step in steps]
    if any(sent):
        yield "sent_bytes", sent
    for part, column in zip(_PARTS, parts, strict=True):
        yield f"part/{part}", column
    yield from _named("log", [step.logs for step in steps])
    yield from _named("total", [step.totals for step in steps])


def column_of(name: str, steps: Sequence[StepLike]) -> list[float | None]:
    """Return the number of that name of each step; None where there is none."""
    kind, _, rest = name.partition("/")
    if kind in ("log", "total"):
        return [_number(found.get(rest)) for found in map(attrgetter(f"{kind}s"), steps)]
    if kind == "part":
        return list(map(attrgetter(f"seconds.{rest}"), steps)) if rest in _PARTS else [None] * len(steps)
    if name == "loss":
        losses = list(map(attrgetter("loss"), steps))
        return [loss if type(loss) is float else number_in(loss) for loss in losses]
    if name in ("samples", "sent_bytes"):
        return [float(number) for number in map(attrgetter(name), steps)]
    if name in ("step_s", "samples_per_s"):
        whole = [sum(parts) for parts in map(_ALL_PARTS, steps)]
        if name == "step_s":
            return list(whole)
        return [step.samples / each if each > 0 else None for step, each in zip(steps, whole, strict=True)]
    return [None] * len(steps)


def _named(prefix: str, found: list[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    columns: dict[str, list[float]] = {}
    for each in found:
        for name, value in each.items():
            if (number := _number(value)) is not None:
                columns.setdefault(name, []).append(number)
    for name, column in columns.items():
        yield f"{prefix}/{name}", column


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


def _extremes(column: list[float]) -> tuple[Extremes, tuple[int, int, int] | None]:
    if not column:
        return (0.0, 0.0, 0.0, 0), None
    total = sum(column)
    if math.isfinite(total):
        return (min(column), max(column), _short(total), len(column)), None
    finite = [value for value in column if math.isfinite(value)]
    strange = (sum(map(math.isnan, column)), column.count(math.inf), column.count(-math.inf))
    if not finite:
        return (0.0, 0.0, 0.0, 0), strange
    total = math.fsum(finite) if max(map(abs, finite)) < 1e300 else math.copysign(1e308, sum(finite))
    return (min(finite), max(finite), _short(total), len(finite)), strange if any(strange) else None


def _short(value: float) -> float:
    """Return a sum with the digits that its mean needs: what an addition leaves after them is noise."""
    return float(f"{value:.12g}")


# -- reading -----------------------------------------------------------------------------------------


def lines_in(data: bytes) -> list[Scanned]:
    """Return the whole lines in a piece of a journal that begins with a line, as far as they can be read."""
    data = data[: data.rfind(b"\n") + 1]
    try:
        return _scanned.decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [placed.line for placed in scan(0, data) if isinstance(placed.line, Scanned)]


def scan(offset: int, data: bytes) -> list[Placed]:
    """Return the whole lines of a piece of a journal that begins with a line at ``offset``."""
    found: list[Placed] = []
    start = 0
    while (end := data.find(b"\n", start) + 1) > 0:
        text = data[start:end]
        line: Scanned | None
        try:
            line = _scanned.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            line = _forgiving(text)
        found.append(Placed(offset + start, offset + end, text, line))
        start = end
    return found


def _forgiving(text: bytes) -> Scanned | None:
    """Return of a line what can be understood: a newer version may write other types."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        line = msgspec.json.decode(text)
        if isinstance(line, dict) and isinstance(line.get("kind"), str):
            known: dict[str, Any] = {}
            for field in msgspec.structs.fields(Scanned):
                if line.get(field.name) is not None:
                    with contextlib.suppress(msgspec.ValidationError):
                        known[field.name] = msgspec.convert(line[field.name], field.type, strict=False)
            return Scanned(**known)
    return None


def read_blocks(data: bytes) -> tuple[list[Block], int]:
    """Return the blocks in a piece of an index, and how many of its lines are broken."""
    found: list[Block] = []
    num_broken = 0
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _blocks.decode_lines(data), 0
    for text in data.split(b"\n"):
        if text:
            try:
                found.append(_blocks.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError):
                num_broken += 1
    return found, num_broken


def is_true(block: Block, journal: BinaryIO | int, size: int) -> bool:
    """Return whether a journal has the last line of a block."""
    if not 0 <= block.offset < block.end <= size or block.lines < 1:
        return False
    descriptor = journal if isinstance(journal, int) else journal.fileno()
    num_bytes = min(block.end - block.offset, 1 << 16)
    while True:
        data = os.pread(descriptor, num_bytes, block.end - num_bytes)
        if len(data) < num_bytes or not data.endswith(b"\n"):
            return False
        begin = data.rfind(b"\n", 0, -1) + 1
        if begin > 0 or num_bytes == block.end - block.offset:
            return zlib.crc32(data[begin:]) == block.check
        num_bytes = min(2 * num_bytes, block.end - block.offset)


def true_blocks(blocks: Sequence[Block], descriptor: int, size: int) -> list[Block]:
    """Return the blocks, by offset, that a journal has: all of them before the first that it has not.

    Journals are cut at their end, and grow there. So what was true of a block is true of all before it.
    """
    ordered: list[Block] = []
    for block in sorted(blocks, key=_offset):
        is_sound = block.lines > 0 and 0 <= block.offset < block.end and block.first <= block.last
        if is_sound and block.offset >= (ordered[-1].end if ordered else 0):
            ordered.append(block)
    low, high = 0, len(ordered)
    if ordered and is_true(ordered[-1], descriptor, size):
        return ordered
    while low < high:
        middle = (low + high) // 2
        if is_true(ordered[middle], descriptor, size):
            low = middle + 1
        else:
            high = middle
    return ordered[:low]


def _offset(block: Block) -> int:
    return block.offset


def cut(journal: Path, size: int) -> None:
    """Cut the index of a journal that was cut to ``size`` bytes. An index that cannot be cut is removed."""
    path = path_of(journal)
    try:
        data = path.read_bytes()
    except OSError:
        return
    blocks, num_broken = read_blocks(data)
    kept = [block for block in blocks if block.end <= size]
    if num_broken or len(kept) < len(blocks):
        _replace(path, kept)


def _replace(path: Path, blocks: Sequence[Block]) -> None:
    try:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(b"".join(msgspec.json.encode(block) + b"\n" for block in blocks))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()


# -- writing -----------------------------------------------------------------------------------------


class Indexer:
    """Writes the index of a journal, as the journal's writer. Never raises: without an index a view only takes longer.

    Args:
        journal: its path.
    """

    def __init__(self, journal: Path) -> None:
        self._journal, self._path = journal, path_of(journal)
        self._placed: list[Placed] = []
        self._end = -1
        """Of what is indexed or waits in ``_placed``; -1: not known yet."""
        self._holes: list[tuple[int, int]] = []
        """Parts of the journal that have no block yet, from an earlier writer."""

    def begin(self) -> None:
        """Look at the journal and its index as another writer has left them."""
        self._placed, self._holes, self._end = [], [], -1
        try:
            with self._journal.open("rb") as file:
                self._begin(file)
        except FileNotFoundError:
            self._end = 0
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        except OSError:
            pass

    def _begin(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        end, self._holes = self._go_on(file.fileno(), size)
        if size - end > CATCH_UP_BYTES:
            begin = _line_at(file, size - CATCH_UP_BYTES // 2)
            self._holes.append((end, begin))
            end = begin
        self._end = end
        self._take(scan(end, os.pread(file.fileno(), size - end, end)))

    def _go_on(self, descriptor: int, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the end of what is indexed, and the holes before it. Cuts what the journal has not."""
        try:
            with self._path.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                file.seek(max(0, length - PIECE_BYTES))
                data = file.read()
        except OSError:
            return 0, []
        newest = max(read_blocks(data[: data.rfind(b"\n") + 1])[0], key=_offset, default=None)
        if newest is not None and data.endswith(b"\n") and is_true(newest, descriptor, size):
            return newest.end, list(newest.holes)
        blocks, _ = read_blocks(self._path.read_bytes())  # the journal was cut, or a writer was killed
        kept = true_blocks(blocks, descriptor, size)
        _replace(self._path, kept)
        holes, end = [], 0
        for block in kept:
            if block.offset > end:
                holes.append((end, block.offset))
            end = block.end
        return end, holes

    def add(self, offset: int, text: bytes, event: LineEvent) -> None:
        """Note a line that was written at ``offset``."""
        if offset != self._end:
            if offset < self._end or self._end < 0:
                self.begin()  # the journal was cut, or was not there
                return
            self._holes.append((self._end, offset))
            self._close_block()
        self._end = offset + len(text)
        self._placed.append(Placed(offset, self._end, text, event))
        if len(self._placed) >= BLOCK_LINES:
            self._close_block()
            if self._holes:
                self._fill()

    def _take(self, placed: Sequence[Placed]) -> None:
        for each in placed:
            self._placed.append(each)
            self._end = each.end
            if len(self._placed) >= BLOCK_LINES:
                self._close_block()

    def _close_block(self) -> None:
        placed, self._placed = self._placed, []
        if placed:
            block = block_of(placed)
            self._write([msgspec.structs.replace(block, holes=self._holes) if self._holes else block])

    def _fill(self) -> None:
        """Index a piece of what an earlier writer has not."""
        begin, end = self._holes[0]
        with contextlib.suppress(OSError), self._journal.open("rb") as file:
            num_bytes = PIECE_BYTES
            while not (placed := scan(begin, os.pread(file.fileno(), min(num_bytes, end - begin), begin))):
                if num_bytes >= end - begin:
                    self._holes.pop(0)
                    return
                num_bytes *= 2
            self._write([block_of(placed[at : at + BLOCK_LINES]) for at in range(0, len(placed), BLOCK_LINES)])
            begin = placed[-1].end
            self._holes[:1] = [(begin, end)] if begin < end else []

    def _write(self, blocks: Sequence[Block]) -> None:
        try:
            data = b"".join(msgspec.json.encode(block) + b"\n" for block in blocks)
            with self._path.open("ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    is_whole = file.write(data) == len(data)
                except OSError:
                    is_whole = False
                if not is_whole:
                    file.truncate(size)
                    self._lose(blocks)
        except (OSError, UnicodeEncodeError):  # the name of a log may have half a character
            self._lose(blocks)

    def _lose(self, blocks: Sequence[Block]) -> None:
        begin, end = blocks[0].offset, blocks[-1].end
        if self._holes and self._holes[-1][1] == begin:
            begin, _ = self._holes.pop()
        self._holes.append((begin, end))


def _line_at(file: BinaryIO, offset: int) -> int:
    """Return the offset of the first line that begins at ``offset`` or later."""
    file.seek(max(0, offset - 1))
    file.readline()
    return file.tell()
