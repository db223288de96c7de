"""The journal, as a reader sees it that does not want all of it: blocks of lines, and lines by their offset."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from unisono.journal.index import (
    BLOCK_LINES,
    Block,
    Placed,
    Scanned,
    block_of,
    is_true,
    lines_in,
    path_of,
    read_blocks,
    scan,
    true_blocks,
)
from unisono.journal.lines import LineEvent, from_line

__all__ = ["Lines"]

PIECE_BYTES: Final = 1 << 20
INDEX_BYTES: Final = 1 << 18
"""When a journal has grown by more than this, its index is asked before its lines are."""
HEAD_BYTES: Final = 40
MOST_LINE_BYTES: Final = 1 << 24
"""What is longer is no line of a journal."""
BUDGET_S: Final = 0.25
"""So long a call reads what has no index; the next call goes on."""


class Lines:
    """Lines of a journal that may grow while it is read.

    Args:
        path: of the journal, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Block] = []
        """By offset. The last of them may have room for more lines."""
        self.names: dict[str, None] = {}
        self.size = 0
        """Of the journal."""
        self.num_broken = 0
        self.first_broken = ""
        self.head = b""
        """How the file begins, where it has no whole line."""
        self.error = ""
        self._open: list[Placed] = []
        """The lines of the last block, while it has room."""
        self._end = 0
        """All whole lines before this offset are in a block, except for the holes."""
        self._holes: list[tuple[int, int]] = []
        self._index_end = 0
        self.turn = 0
        """Grows when the file is another one, or was cut: what was known of it holds no more."""
        self._identity: tuple[int, int] | None = None
        self._with_steps: list[Block] | None = None

    @property
    def missing(self) -> float:
        """Part of the journal that was not looked at yet, 0 to 1: it has no index, or not a whole one."""
        left = sum(end - begin for begin, end in self._holes)
        return left / self.size if self.size else 0.0

    def refresh(self, budget_s: float | None = None) -> None:
        """Look at what is new. Where there is no index, reads lines for ``budget_s`` (default: `BUDGET_S`), and goes on
        in the next call.
        """
        deadline = time.monotonic() + (BUDGET_S if budget_s is None else budget_s)
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                is_same = (found.st_dev, found.st_ino) == self._identity and (
                    not self.blocks or is_true(self.blocks[-1], file, found.st_size)
                )
                if not is_same:  # cut, and perhaps written on
                    self._forget()
                    self._identity = (found.st_dev, found.st_ino)
                self.size, self.error = found.st_size, ""
                descriptor = file.fileno()
                if self.size - self._end > INDEX_BYTES:
                    self._read_index(descriptor)
                self._read_end(descriptor)
                self.head = os.pread(descriptor, HEAD_BYTES, 0) if not self.blocks else b""
                while self._holes and time.monotonic() < deadline:
                    self._fill(descriptor)
        except FileNotFoundError:
            if self._identity is not None:
                self._forget()
        except OSError as error:
            self.error = f"{self.path} cannot be read: {error.strerror or error}"

    @property
    def with_steps(self) -> list[Block]:
        """The blocks that have a step."""
        if self._with_steps is None:
            self._with_steps = [block for block in self.blocks if block.steps]
        return self._with_steps

    def between(self, first: int, last: int) -> Sequence[Block]:
        """Return the blocks that have a step from ``first`` to ``last``."""
        blocks = self.with_steps
        begin = bisect.bisect_left(blocks, first, key=_last_step)
        end = bisect.bisect_right(blocks, last, lo=begin, key=_first_step)
        return blocks[begin:end]

    def read(self, blocks: Sequence[Block]) -> Iterator[Scanned]:
        """Yield the lines of some blocks that follow each other."""
        if not blocks:
            return
        with self.path.open("rb") as file:
            at = 0
            while at < len(blocks):
                begin = at
                at += 1
                while at < len(blocks) and blocks[at].offset == blocks[at - 1].end and at - begin < BLOCK_LINES:
                    at += 1
                offset, end = blocks[begin].offset, blocks[at - 1].end
                yield from lines_in(os.pread(file.fileno(), end - offset, offset))

    def events(self, blocks: Sequence[Block]) -> Iterator[LineEvent]:
        """Yield the events of some blocks that follow each other, whole."""
        with self.path.open("rb") as file:
            for block in blocks:
                for text in os.pread(file.fileno(), block.end - block.offset, block.offset).splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                        if (event := from_line(json.loads(text))) is not None:
                            yield event

    def texts(self, offset: int) -> list[bytes]:
        """Return the whole lines from ``offset`` on that were there when the file was last looked at."""
        if offset >= self._end:
            return []
        try:
            with self.path.open("rb") as file:
                data = os.pread(file.fileno(), self._end - offset, offset)
        except OSError:
            return []
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)

    def _forget(self) -> None:
        self.turn += 1
        self.blocks, self.names, self._open, self._holes = [], {}, [], []
        self.size = self._end = self._index_end = self.num_broken = 0
        self.first_broken = self.error = ""
        self.head = b""
        self._identity = self._with_steps = None

    def _read_index(self, descriptor: int) -> None:
        try:
            with path_of(self.path).open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._index_end:
                    self._index_end = 0  # it was cut
                file.seek(self._index_end)
                data = file.read()
        except OSError:
            data = b""
        data = data[: data.rfind(b"\n") + 1]
        blocks, _ = read_blocks(data)
        found = true_blocks(blocks, descriptor, self.size)
        self._index_end += len(data)
        known = self.blocks[:-1] if self._open else self.blocks  # an open block may be in a whole one
        begin = known[-1].end if known else 0
        fresh = [block for block in found if block.offset >= begin]
        if fresh:
            self.blocks, self._open = list(known), []
            self._end = begin
            for block in fresh:
                if block.offset > self._end:
                    self._holes.append((self._end, block.offset))
                self._add(block)
                self._end = block.end
        if self.size - self._end > INDEX_BYTES:  # no index, or an old one: the end first, the rest by and by
            at = self.size - INDEX_BYTES // 2
            while at < self.size and (cut := os.pread(descriptor, INDEX_BYTES, at).find(b"\n")) < 0:
                at += INDEX_BYTES
            if at < self.size:
                self._open = []
                self._holes.append((self._end, at + cut + 1))
                self._end = at + cut + 1

    def _read_end(self, descriptor: int) -> None:
        while self._end < self.size and (placed := _piece(descriptor, self._end, self.size)):  # the rest is half a line
            self._take(placed)

    def _take(self, placed: Sequence[Placed]) -> None:
        for each in placed:
            self._open.append(each)
            self._end = each.end
            if len(self._open) == BLOCK_LINES:
                self._put_open()
                self._open = []
        self._put_open()
        self._note_broken(placed)

    def _put_open(self) -> None:
        if not self._open:
            return
        block = block_of(self._open)
        if self.blocks and self.blocks[-1].offset == block.offset:
            self.blocks.pop()
        self._add(block)

    def _add(self, block: Block) -> None:
        self.blocks.append(block)
        self._name(block)

    def _name(self, block: Block) -> None:
        self._with_steps = None
        if not block.values.keys() <= self.names.keys():
            self.names.update(dict.fromkeys(block.values))
        for _, _, totals in block.evaluations:
            self.names.update(dict.fromkeys(f"evaluation/{name}" for name in totals))

    def _fill(self, descriptor: int) -> None:
        begin, end = self._holes[0]
        placed = _piece(descriptor, begin, end)
        self._note_broken(placed)
        fresh = [block_of(placed[at : at + BLOCK_LINES]) for at in range(0, len(placed), BLOCK_LINES)]
        for block in fresh:
            self._name(block)
        at = bisect.bisect_left(self.blocks, begin, key=_offset)
        self.blocks[at:at] = fresh
        begin = placed[-1].end if placed else end
        self._holes[:1] = [(begin, end)] if begin < end else []

    def _note_broken(self, placed: Sequence[Placed]) -> None:
        for each in placed:
            if each.line is None:
                self.num_broken += 1
                if not self.first_broken:
                    self.first_broken = each.text[:HEAD_BYTES].decode(errors="replace").rstrip("\n")


def _piece(descriptor: int, begin: int, end: int) -> list[Placed]:
    """Return some whole lines from ``begin`` on; none if none ends before ``end``, or the first one is too long."""
    num_bytes = min(PIECE_BYTES, end - begin)
    while not (placed := scan(begin, os.pread(descriptor, num_bytes, begin))):
        if num_bytes >= min(MOST_LINE_BYTES, end - begin):
            break
        num_bytes = min(4 * num_bytes, MOST_LINE_BYTES, end - begin)
    return placed


def _offset(block: Block) -> int:
    return block.offset


def _last_step(block: Block) -> int:
    return block.last


def _first_step(block: Block) -> int:
    return block.first
